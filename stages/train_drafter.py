"""Train the drafter of one build, or hand on the one that it imports (DVC stage `train`)."""

from functools import cache, partial

from dspark.workspace.stage import stage


@stage("train")
def main(inputs, paths, progress):
    from dspark.corpus.sequences import read_sequences
    from dspark.device import accelerator
    from dspark.drafters.config import DrafterConfig
    from dspark.features.online import open_split
    from dspark.features.store import FeatureManifest
    from dspark.io.jsonfile import read_model
    from dspark.targets.ends import read_ends
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record
    from dspark.training.imported import take_over
    from dspark.training.trainer import train
    from dspark.training.warm_start import read_initial

    record = read_record(paths.target)
    ends = read_ends(record, paths.root)
    manifest = read_model(paths.corpus / "features" / "manifest.json", FeatureManifest)
    # If anything is to be computed, then by one target in each process, on the device that the process trains on.
    target = cache(lambda: load_target(record, paths.root, device=accelerator()))

    def split(name):
        return open_split(
            manifest,
            name,
            paths.features,
            sequences=partial(read_sequences, paths.corpus / "responses" / f"{name}.jsonl"),
            target=target,
            max_length=inputs.training.max_length,
        )

    if inputs.training.imported is not None:
        folder = paths.workspace.imported(inputs.training.imported)
        taken = take_over(
            folder, inputs.imported, ends.embedding, ends.head, record, split("dev"), inputs.training, progress
        )
        taken.write(paths.out, record)
        return
    initial = None
    if inputs.training.initial is not None:
        package = paths.workspace.package(inputs.training.initial.package)
        initial = read_initial(package, inputs.initial, ends.embedding, ends.head, record)
    result = train(
        DrafterConfig.of(record, inputs.drafter),
        ends.embedding,
        ends.head,
        split("train"),
        split("dev"),
        inputs.training,
        paths.work,
        progress,
        eos_token_ids=record.eos_token_ids,
        initial=initial,
        read_budget=paths.read_budget,
    )
    result.write(paths.out, record)


if __name__ == "__main__":
    main()
