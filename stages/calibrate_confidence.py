"""Fit the temperatures of the drafter's confidences of one build (DVC stage `calibrate`)."""

from dspark.workspace.stage import stage


@stage("calibrate")
def main(inputs, paths, progress):
    from dspark.calibration.results import write_results
    from dspark.corpus.prompts import read_prompts
    from dspark.decoding.drafting import TorchProposer
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.evaluation.calibrate import calibrate_drafter
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

    record = read_record(paths.target)
    target = load_target(record, paths.root, dtype=inputs.calibration.dtype)
    drafter = read_checkpoint(paths.build / "train" / "drafter", target.embedding, target.head, record=record)
    proposer = TorchProposer(drafter.to(target.dtype))
    prompts = read_prompts(paths.corpus / "prompts" / "calibration.jsonl")
    write_results(paths.out, calibrate_drafter(target, proposer, prompts, inputs.calibration, progress))


if __name__ == "__main__":
    main()
