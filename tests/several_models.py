"""Copies of the shipped model whose metadata allows only one of its twelve directions each.

    folder = one_way(path, "en-de", "de-fr")    creates path/en-de.bin and path/de-fr.bin
"""
import pathlib

import moefile

SHIPPED = pathlib.Path(__file__).resolve().parents[1] / "models" / "en-de-fr-es.bin"


def one_way(folder, *directions):
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    meta, tensors = moefile.read(SHIPPED)[:2]
    for direction in directions:
        source, target = direction.split("-")
        moefile.write_model(folder / f"{direction}.bin",
                            {**meta, "languages.sources": [source], "languages.targets": [target]}, tensors)
    return folder
