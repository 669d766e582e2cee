"""Validate, deduplicate, render and split the prompts of one corpus (DVC stage `prompts`)."""

from dspark.workspace.stage import stage


@stage("prompts")
def main(inputs, paths, progress):
    from dspark.corpus.prepare import prepare_prompts
    from dspark.targets.loading import load_tokenizer
    from dspark.targets.record import read_record
    from dspark.targets.template import ChatTemplate

    record = read_record(paths.target)
    encoder = ChatTemplate(load_tokenizer(record.folder(paths.root)), record.thinking_mode)
    domains = [*inputs.domains, *inputs.evaluation_domains]
    summary = prepare_prompts(inputs.corpus_settings(), domains, paths.domains, encoder, paths.out, progress)
    progress.note(summary.told(paths.stage.output(paths.key, paths.entry)))


if __name__ == "__main__":
    main()
