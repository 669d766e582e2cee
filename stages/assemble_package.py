"""Assemble and verify the package of one build (DVC stage `package`)."""

from dspark.workspace.stage import stage


@stage("package")
def main(inputs, paths, progress):
    from dspark.package.assemble import assemble
    from dspark.package.lineage import gather_lineage
    from dspark.package.sources import Sources
    from dspark.report.card import render_card
    from dspark.targets.record import read_record

    names = [profile.name for profile in inputs.profiles]
    costs = {name: paths.cost_of(name) for name in names}
    sources = Sources(
        build=inputs.build,
        record=read_record(paths.target),
        profiles=inputs.profiles,
        corpus=paths.corpus,
        train=paths.build / "train",
        calibrate=paths.build / "calibrate",
        evaluate=paths.build / "evaluate",
        export=paths.build / "export",
        costs={name: path for name, path in costs.items() if path.is_file()},
        certificates={name: paths.build / "certify" / f"{name}.json" for name in names},
        lineage=gather_lineage(paths.root),
    )
    assemble(sources, paths.out, card=render_card, work=paths.work)


if __name__ == "__main__":
    main()
