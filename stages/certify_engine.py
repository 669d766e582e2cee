"""Measure the exported drafter in the engine of one serving profile (DVC stage `certify`)."""

from dspark.workspace.stage import stage


@stage("certify")
def main(inputs, paths, progress):
    from dspark.io.jsonfile import write_model

    profile = inputs.profile
    if profile.access == "none":
        from dspark.evaluation.entry import absent_entry

        write_model(paths.out, absent_entry(profile))
        return

    import torch

    from dspark.calibration.results import read_report
    from dspark.corpus.prompts import read_prompts
    from dspark.decoding.drafting import TorchProposer
    from dspark.decoding.records import read_records
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.engines.onnxruntime import OnnxProposer
    from dspark.evaluation.certify import certify_reference
    from dspark.evaluation.drafter import temperatures_of
    from dspark.evaluation.results import LosslessReport
    from dspark.io.jsonfile import read_json, read_model
    from dspark.profiling.cost import CostReport
    from dspark.profiling.fingerprint import threads
    from dspark.scheduling.prefix import PrefixScheduler
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

    torch.set_num_threads(threads(profile))
    record = read_record(paths.target)
    calibration = read_report(paths.build / "calibrate" / "calibration.json")
    curve = read_model(paths.cost, CostReport).curve

    def load(dtype):
        target = load_target(record, paths.root, dtype=dtype)
        if profile.draft_backend == "onnxruntime":
            return target, OnnxProposer(paths.build / "export" / "onnxruntime")
        drafter = read_checkpoint(paths.build / "export" / "drafter", target.embedding, target.head, record=record)
        return target, TorchProposer(drafter.to(target.dtype))

    entry = certify_reference(
        profile,
        read_json(paths.fingerprint),
        load,
        read_prompts(paths.corpus / "prompts" / "eval.jsonl"),
        inputs.evaluation,
        prompts_per_domain=inputs.certification.prompts_per_domain,
        offline=read_records(paths.build / "evaluate" / "records" / "temperature-0.safetensors"),
        lossless=read_model(paths.build / "evaluate" / "lossless.json", LosslessReport),
        scheduler=PrefixScheduler(curve, calibration.gamma, temperatures_of(calibration, 0.0)) if curve else None,
        progress=progress,
    )
    write_model(paths.out, entry)


if __name__ == "__main__":
    main()
