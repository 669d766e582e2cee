"""Measure the step times of one serving profile (DVC stage `profile`)."""

from dspark.workspace.stage import stage


@stage("profile")
def main(inputs, paths, progress):
    from dspark.io.jsonfile import read_json, write_json, write_model

    profile = inputs.profile
    if profile.access == "none":
        write_json(paths.out / "absent.json", {"profile": profile.name, "reason": profile.reason})
        return

    import torch

    from dspark.drafters.config import DrafterConfig
    from dspark.export.backend import onnx_backends
    from dspark.profiling.fingerprint import threads
    from dspark.profiling.steps import profile_engine
    from dspark.targets.loading import load_target
    from dspark.targets.record import read_record

    def backends(drafter):
        wanted = {profile.draft_backend, *profile.profile_backends}
        return onnx_backends(drafter, record, paths.work) if "onnxruntime" in wanted else {}

    torch.set_num_threads(threads(profile))
    record = read_record(paths.target)
    report = profile_engine(
        load_target(record, paths.root, dtype=profile.dtype),
        DrafterConfig.of(record, inputs.drafter),
        profile,
        read_json(paths.fingerprint),
        backends=backends,
        progress=progress,
    )
    write_model(paths.out / "cost.json", report)


if __name__ == "__main__":
    main()
