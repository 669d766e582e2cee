"""Measure acceptance, losslessness and throughput of one build's drafter (DVC stage `evaluate`)."""

from functools import partial

from dspark.workspace.stage import stage


@stage("evaluate")
def main(inputs, paths, progress):
    import torch

    from dspark.calibration.results import read_report
    from dspark.corpus.prompts import read_prompts
    from dspark.device import accelerator, serving_device
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.engines.onnxruntime import OnnxProposer, providers_on
    from dspark.evaluation.drafter import evaluate_drafter
    from dspark.io.jsonfile import read_model
    from dspark.profiling.cost import CostReport
    from dspark.profiling.fingerprint import threads
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record
    from dspark.workspace.rivals import rival_drafter

    torch.set_num_threads(threads(inputs.profile))
    record = read_record(paths.target)
    cost = read_model(paths.cost, CostReport) if paths.cost.is_file() else None
    unmeasured = f"serving profile {inputs.profile.name} was not profiled"
    measured, fastest = serving_device(inputs.profile), accelerator()

    def load(dtype, device=measured):
        target = load_target(record, paths.root, dtype=dtype, device=device)
        drafter = read_checkpoint(paths.build / "train" / "drafter", target.embedding, target.head, record=record)
        return target, drafter.to(target.dtype)

    def backends(target):
        exported = paths.build / "export" / "onnxruntime"
        if not exported.is_dir():
            return {}
        return {"onnxruntime": OnnxProposer(exported, providers=providers_on(measured))}

    evaluate_drafter(
        load,
        read_prompts(paths.corpus / "prompts" / "eval.jsonl"),
        inputs.evaluation,
        paths.out,
        training_domains=inputs.training_domains,
        calibration=read_report(paths.build / "calibrate" / "calibration.json"),
        cost=cost.scheduling if cost is not None else None,
        no_cost=cost.why_no_curve if cost is not None else unmeasured,
        backends=backends,
        rivals=[rival_drafter(paths.workspace, digest, record) for digest in inputs.against],
        sampled=partial(load, device=fastest) if fastest != measured else None,
        progress=progress,
    )


if __name__ == "__main__":
    main()
