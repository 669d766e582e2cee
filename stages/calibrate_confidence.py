"""Fit the temperatures of the drafter's confidences of one build (DVC stage `calibrate`)."""

from dspark.workspace.stage import stage


@stage("calibrate")
def main(inputs, paths, progress):
    from dspark.calibration.results import write_absence, write_results
    from dspark.corpus.prompts import read_prompts
    from dspark.decoding.proposers import torch_proposer
    from dspark.device import accelerator
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.evaluation.acceptance import NO_CONFIDENCE
    from dspark.evaluation.calibrate import calibrate_drafter
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

    record = read_record(paths.target)
    target = load_target(record, paths.root, dtype=inputs.calibration.dtype, device=accelerator())
    drafter = read_checkpoint(paths.build / "train" / "drafter", target.embedding, target.head, record=record)
    if not drafter.config.confidence:
        write_absence(paths.out, drafter.config.gamma, NO_CONFIDENCE)
        return
    proposer = torch_proposer(drafter.to(target.dtype))
    prompts = read_prompts(paths.corpus / "prompts" / "calibration.jsonl")
    recorded = {"decoding": lambda *_: None, "server": from_server, "shards": from_shards}[
        inputs.calibration.records.kind
    ](inputs, paths, prompts, progress)
    write_results(paths.out, calibrate_drafter(target, proposer, prompts, inputs.calibration, progress, recorded))


def from_server(inputs, paths, prompts, progress):
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.engines.sglang_client import SGLangClient
    from dspark.evaluation.recorded import records_from_server
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

    record = read_record(paths.target)
    # A few replies: the GPU may be full of the server that gave them.
    target = load_target(record, paths.root, dtype="float32", device="cpu")
    drafter = read_checkpoint(paths.build / "train" / "drafter", target.embedding, target.head, record=record)
    client = SGLangClient(inputs.profile.records_url)
    return records_from_server(client, target, drafter.float(), prompts, inputs.calibration, progress)


def from_shards(inputs, paths, prompts, progress):
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.evaluation.recorded import records_from_shards
    from dspark.targets.ends import read_ends
    from dspark.targets.record import read_record

    record = read_record(paths.target)
    ends = read_ends(record, paths.root)
    drafter = read_checkpoint(paths.build / "train" / "drafter", ends.embedding, ends.head, record=record)
    return records_from_shards(
        inputs.calibration.records, paths.root, drafter, record, exported=inputs.export_dtype, work=paths.work
    )


if __name__ == "__main__":
    main()
