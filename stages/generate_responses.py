"""Let the target answer the train and dev prompts of one corpus (DVC stage `responses`)."""

from dspark.workspace.stage import stage


@stage("responses")
def main(inputs, paths, progress):
    from dspark.corpus.prompts import read_prompts
    from dspark.corpus.responses import answer_prompts
    from dspark.device import accelerator
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

    target = load_target(read_record(paths.target), paths.root, device=accelerator())
    prompts = {split: read_prompts(paths.corpus / "prompts" / f"{split}.jsonl") for split in ("train", "dev")}
    answer_prompts(target, prompts, inputs.responses, paths.store / "responses", paths.out, progress)


if __name__ == "__main__":
    main()
