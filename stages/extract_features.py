"""Put the target's hidden states of one corpus into the feature store (DVC stage `features`)."""

from dspark.workspace.stage import stage


@stage("features")
def main(inputs, paths, progress):
    from dspark.corpus.sequences import read_sequences
    from dspark.device import accelerator
    from dspark.features.extraction import extract, plan
    from dspark.io.jsonfile import write_model
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

    record = read_record(paths.target)
    sequences = {split: read_sequences(paths.corpus / "responses" / f"{split}.jsonl") for split in ("train", "dev")}
    manifest = plan(record, sequences, inputs.features)
    write_model(paths.work / "manifest.json", manifest)  # what `dspark store gc` leaves alone if this is stopped
    if inputs.features.mode != "online":
        target = load_target(record, paths.root, device=accelerator())
        manifest = extract(target, sequences, inputs.features, paths.features, progress)
    write_model(paths.out / "manifest.json", manifest)


if __name__ == "__main__":
    main()
