"""Measure the step times of one serving profile (DVC stage `profile`)."""

from dspark.workspace.stage import stage


@stage("profile")
def main(inputs, paths, progress):
    from dspark.io.jsonfile import read_json, write_json, write_model

    profile = inputs.profile
    if profile.access == "none":
        write_json(paths.out / "absent.json", {"profile": profile.name, "reason": profile.reason})
        return
    if profile.access == "url" and profile.profile_url is None:
        reason = f"serving profile {profile.name} names no profile_url: no cost table was measured"
        write_json(paths.out / "absent.json", {"profile": profile.name, "reason": reason})
        return
    measure = {"reference": reference, "llamacpp": llamacpp, "sglang": sglang}[profile.engine]
    write_model(paths.out / "cost.json", measure(inputs, paths, read_json(paths.fingerprint), progress))


def reference(inputs, paths, fingerprint, progress):
    import torch

    from dspark.device import serving_device
    from dspark.drafters.config import DrafterConfig
    from dspark.export.backend import onnx_backends
    from dspark.profiling.fingerprint import threads
    from dspark.profiling.steps import profile_engine
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

    profile, device = inputs.profile, serving_device(inputs.profile)

    def backends(drafter):
        wanted = {profile.draft_backend, *profile.profile_backends}
        return onnx_backends(drafter, record, paths.work, device=device) if "onnxruntime" in wanted else {}

    torch.set_num_threads(threads(profile))
    record = read_record(paths.target)
    return profile_engine(
        load_target(record, paths.root, dtype=profile.dtype, device=device),
        DrafterConfig.of(record, inputs.drafter),
        profile,
        fingerprint,
        backends=backends,
        progress=progress,
    )


def llamacpp(inputs, paths, fingerprint, progress):
    from dspark.drafters.config import DrafterConfig
    from dspark.export.gguf import write_drafter_gguf
    from dspark.profiling.llamacpp import profile_llamacpp
    from dspark.profiling.steps import random_drafter
    from dspark.targets.ends import read_ends
    from dspark.targets.record import read_record
    from dspark.targets.served import described_file, served_file

    record = read_record(paths.target)
    ends = read_ends(record, paths.root)
    config = DrafterConfig.of(record, inputs.drafter)
    drafter_file = paths.work / "drafter.gguf"
    described = described_file(record, paths.root, progress)
    write_drafter_gguf(drafter_file, random_drafter(config, ends.embedding, ends.head), described, precision="F16")
    return profile_llamacpp(
        record,
        config,
        inputs.profile,
        fingerprint,
        target_file=served_file(record, paths.root, progress=progress),
        drafter_file=drafter_file,
        work=paths.work,
        progress=progress,
    )


def sglang(inputs, paths, fingerprint, progress):
    from dspark.drafters.config import DrafterConfig
    from dspark.engines.sglang_client import SGLangClient
    from dspark.profiling.sglang import profile_sglang
    from dspark.targets.record import read_record

    record = read_record(paths.target)
    return profile_sglang(
        SGLangClient(inputs.profile.profile_url),
        record,
        DrafterConfig.of(record, inputs.drafter),
        inputs.profile,
        fingerprint,
        progress=progress,
    )


if __name__ == "__main__":
    main()
