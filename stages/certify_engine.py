"""Measure the exported drafter in the engine of one serving profile (DVC stage `certify`).

The reference engine runs on the device that the profile declares. What other engines said is replayed on the CPU: a few
passes, and a GPU may be full of the engine's own memory.
"""

from dspark.workspace.stage import stage


@stage("certify")
def main(inputs, paths, progress):
    from dspark.evaluation.entry import absent_entry
    from dspark.io.jsonfile import read_json, write_model

    profile = inputs.profile
    if profile.access == "none":
        write_model(paths.out, absent_entry(profile))
        return
    measure = {"reference": reference, "llamacpp": llamacpp, "sglang": attached, "vllm": attached}[profile.engine]
    write_model(paths.out, measure(inputs, paths, read_json(paths.fingerprint), progress))


def reference(inputs, paths, fingerprint, progress):
    import torch

    from dspark.calibration.results import read_report
    from dspark.corpus.prompts import read_prompts
    from dspark.decoding.proposers import torch_proposer
    from dspark.decoding.records import read_records
    from dspark.device import serving_device
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.engines.onnxruntime import OnnxProposer, providers_on
    from dspark.evaluation.certify import certify_reference
    from dspark.evaluation.drafter import temperatures_of
    from dspark.evaluation.results import LosslessReport
    from dspark.io.jsonfile import read_model
    from dspark.profiling.cost import CostReport
    from dspark.profiling.fingerprint import threads
    from dspark.scheduling.prefix import PrefixScheduler
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record
    from dspark.workspace.rivals import champion

    profile, device = inputs.profile, serving_device(inputs.profile)
    torch.set_num_threads(threads(profile))
    record = read_record(paths.target)
    calibration = read_report(paths.build / "calibrate" / "calibration.json")
    cost = read_model(paths.cost, CostReport).scheduling if calibration.results else None

    def load(dtype):
        target = load_target(record, paths.root, dtype=dtype, device=device)
        if profile.draft_backend == "onnxruntime":
            return target, OnnxProposer(paths.build / "export" / "onnxruntime", providers=providers_on(device))
        drafter = read_checkpoint(paths.build / "export" / "drafter", target.embedding, target.head, record=record)
        return target, torch_proposer(drafter.to(target.dtype))

    return certify_reference(
        profile,
        fingerprint,
        load,
        read_prompts(paths.corpus / "prompts" / "eval.jsonl"),
        inputs.evaluation,
        prompts_per_domain=inputs.certification.prompts_per_domain,
        offline=read_records(paths.build / "evaluate" / "records" / "temperature-0.safetensors"),
        lossless=read_model(paths.build / "evaluate" / "lossless.json", LosslessReport),
        scheduler=PrefixScheduler(cost, calibration.gamma, temperatures_of(calibration, 0.0)) if cost else None,
        champion=champion(paths.workspace, inputs.against, record, profile, device=device) if inputs.against else None,
        progress=progress,
    )


def llamacpp(inputs, paths, fingerprint, progress):
    from dspark.corpus.prompts import read_prompts
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.evaluation.decoding import spread_prompts
    from dspark.evaluation.entry import absent_entry
    from dspark.evaluation.llamacpp import certify_llamacpp
    from dspark.export.agreement import FEWEST_PROMPTS, agree_with_llamacpp, judge_agreement
    from dspark.export.gguf import load_drafter_gguf
    from dspark.export.report import ParityReport
    from dspark.io.jsonfile import read_model
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record
    from dspark.targets.served import served_file

    profile, exported = inputs.profile, paths.build / "export"
    drafter_file = exported / "llamacpp" / "drafter.gguf"
    if not drafter_file.is_file():
        return absent_entry(profile, read_model(exported / "parity.json", ParityReport).why_absent("gguf"))
    record = read_record(paths.target)
    target = load_target(record, paths.root, dtype="float32", device="cpu")
    prompts = read_prompts(paths.corpus / "prompts" / "eval.jsonl")
    export = agree_with_llamacpp(
        target,
        read_checkpoint(exported / "drafter", target.embedding, target.head, record=record),
        served_file(record, paths.root, precision="F32", progress=progress),
        [prompt.token_ids for prompt in spread_prompts(prompts, FEWEST_PROMPTS)],
        paths.work / "export",
        threads=fingerprint["threads"],
        progress=progress,
    )
    judge_agreement(export, paths.work / "agreement.json")
    return certify_llamacpp(
        profile,
        fingerprint,
        target,
        load_drafter_gguf(drafter_file, record, target.embedding, target.head),
        prompts,
        inputs.evaluation,
        prompts_per_domain=inputs.certification.prompts_per_domain,
        target_file=served_file(record, paths.root, progress=progress),
        drafter_file=drafter_file,
        export=export,
        work=paths.work,
        progress=progress,
    )


def attached(inputs, paths, fingerprint, progress):
    from dspark.corpus.prompts import read_prompts
    from dspark.drafters.checkpoint import read_checkpoint
    from dspark.engines.connect import connect
    from dspark.evaluation.attached import certify_attached
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

    profile = inputs.profile
    record = read_record(paths.target)
    target = load_target(record, paths.root, dtype="float32", device="cpu")
    drafter = read_checkpoint(paths.build / "export" / "drafter", target.embedding, target.head, record=record)
    return certify_attached(
        profile,
        fingerprint,
        connect(profile.url, profile.engine),
        connect(profile.plain_url, profile.engine),
        target,
        drafter.float(),
        read_prompts(paths.corpus / "prompts" / "eval.jsonl"),
        inputs.evaluation,
        prompts_per_domain=inputs.certification.prompts_per_domain,
        progress=progress,
    )


if __name__ == "__main__":
    main()
