"""Write the drafter of one build in every dialect, each read back and compared (DVC stage `export`)."""

from dspark.workspace.stage import stage


@stage("export")
def main(inputs, paths, progress):
    from dspark.corpus.sequences import read_sequences
    from dspark.device import accelerator
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.export.blocks import ProbeBlocks
    from dspark.export.build import export_build
    from dspark.features.online import open_split
    from dspark.features.store import FeatureManifest
    from dspark.io.jsonfile import read_model
    from dspark.targets.ends import read_ends
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record
    from dspark.targets.served import described_file

    record = read_record(paths.target)
    ends = read_ends(record, paths.root)
    drafter = read_checkpoint(paths.build / "train" / "drafter", ends.embedding, ends.head, record=record)
    manifest = read_model(paths.corpus / "features" / "manifest.json", FeatureManifest)
    dev = open_split(
        manifest,
        "dev",
        paths.features,
        sequences=lambda: read_sequences(paths.corpus / "responses" / "dev.jsonl"),
        target=lambda: load_target(record, paths.root, device=accelerator()),
    )
    blocks = ProbeBlocks.of_sequences(dev)
    export_build(
        drafter,
        record,
        inputs.export,
        blocks,
        paths.out,
        embedding=ends.embedding,
        head=ends.head,
        target_file=lambda: described_file(record, paths.root, progress),
        progress=progress,
    )


if __name__ == "__main__":
    main()
