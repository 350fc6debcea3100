"""Models of one direction, of the shipped one that knows twelve: their metadata says which.

    folder = one_way(path, "en-de", "de-fr")    path/en-de.bin, path/de-fr.bin
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
