"""Put the target's hidden states of one corpus into the feature store (DVC stage `features`)."""

from dspark.workspace.stage import stage


@stage("features")
def main(inputs, paths, progress):
    from dspark.corpus.sequences import read_sequences
    from dspark.features.extraction import extract
    from dspark.io.jsonfile import write_model
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

    target = load_target(read_record(paths.target), paths.root)
    sequences = {split: read_sequences(paths.corpus / "responses" / f"{split}.jsonl") for split in ("train", "dev")}
    manifest = extract(target, sequences, inputs.features, paths.store / "features", progress)
    write_model(paths.out / "manifest.json", manifest)


if __name__ == "__main__":
    main()
