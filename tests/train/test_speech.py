#!/usr/bin/env python3
"""Test tools/train/speech.py: it makes frames and phonemes with espeak-ng, trains a Deep MoE on them, and writes a
model file for moe-classify.

Usage: tests/python tests/train/test_speech.py

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`. tools/install-deps --test installs the
requirements. BIN is the folder of the programs.
"""
import importlib.util
import json
import lzma
import math
import os
import subprocess
import sys
import tempfile
import types

import numpy as np
import torch

import convert
import reference as ref
import speech
from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CLASSIFY = os.path.join(os.environ.get("BIN", ROOT), "moe-classify")
torch.set_num_threads(1)
test = Suite()


@test
def filters_are_equidistant_triangles_in_mel():
    rate, size = 22050, 1024
    filters = speech.mel_filters(rate, size)
    low, high = (1127 * math.log(1 + f / 700) for f in (64, 8000))
    corner = [700 * (math.exp((low + i * (high - low) / 41) / 1127) - 1) for i in range(42)]
    for band, row in enumerate(filters):
        left, middle, right = corner[band:band + 3]
        for i, value in enumerate(row):
            f = i * rate / size
            wanted = (f - left) / (middle - left) if left < f <= middle else (right - f) / (right - middle)
            assert abs(value - (wanted if left < f < right else 0)) < 1e-9, (band, i, value)


@test
def tones_are_loudest_in_the_band_around_them():
    rate = 22050
    seconds = np.arange(rate // 2) / rate
    for band in (8, 15, 25, 35):
        low, high = speech.mel(64), speech.mel(8000)
        tone = 700 * math.expm1((low + (band + 1) * (high - low) / 41) / 1127)
        frames = speech.log_mel(np.sin(2 * math.pi * tone * seconds), rate)
        assert frames.shape == (48, 40) and (frames.argmax(1) == band).all()  # windows of 25 ms within 500 ms
    silence = speech.log_mel(np.zeros(rate), rate)
    assert np.isfinite(silence).all() and not len(speech.log_mel(np.zeros(100), rate))


@test
def frames_have_the_middle_phoneme_and_five_neighbours_on_each_side():
    begins = [(0.02, "_:"), (0.04, "S"), (0.0775, "i:"), (0.3, "_")]
    names = speech.phoneme_of_frames(begins, 8)  # frames are centred at 12.5, 22.5, ... ms
    assert names == ["_", "_", "_", "S", "S", "S", "S", "i:"], names
    frames = np.arange(13 * 40).reshape(13, 40)
    windows = speech.with_context(frames)
    assert windows.shape == (3, 11, 40) and all((windows[i] == frames[i:i + 11]).all() for i in range(3))
    scaled = speech.to_bytes(np.array([[-9.0, 2.0, 2.5, 99.0]]), np.full(4, 2.0), np.full(4, 0.5))
    assert scaled.tolist() == [[0, 128, 170, 255]], scaled


@test
def espeak_reports_the_start_of_phonemes():
    espeak = speech.Espeak()
    wave, begins = espeak.say("She sees.", "en-us+f2")
    heard = [name for _, name in begins if not name.startswith("_")]
    assert heard == ["S", "i:", "s", "i:", "z"], heard
    frames = speech.log_mel(wave, espeak.rate)
    names = np.array(speech.phoneme_of_frames(begins, len(frames)))
    slope = frames[:, 30:].mean(1) - frames[:, :10].mean(1)
    assert slope[names == "s"].mean() > 3 + slope[names == "i:"].mean()  # sibilants have more energy in high bands
    assert frames[names == "_"].mean() < frames[names != "_"].mean() - 3
    assert len(espeak.say("She sees.", "en-us+m1")[0]) != len(wave)
    try:
        espeak.say("x", "no-such-voice")
        raise AssertionError("not refused")
    except SystemExit as error:
        assert "no-such-voice" in str(error)


TEXT = ["She sees the sea.", "Where is my book?", "We go home now.", "He has two dogs.", "It was cold.", "Read this!",
        "They came late.", "Open the door, please.", "I know him well.", "You are right.", "Good morning, my friend."]


@test
def the_papers_shape_runs_from_sentences_to_the_engine():
    spec = importlib.util.spec_from_file_location("digits", os.path.join(ROOT, "tools", "train", "train-digits.py"))
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    with tempfile.TemporaryDirectory() as folder:
        path = lambda name: os.path.join(folder, name)
        with lzma.open(path("text.tsv.xz"), "wt", encoding="utf-8") as file:
            file.write("en\tde\n" + "".join(line + "\tx\n" for line in TEXT))
        speech.make(types.SimpleNamespace(text=path("text.tsv.xz"), column="en", out=folder, voices=speech.VOICES[:2],
                                          sentences=11, frames=300, test_frames=40))
        data = digits.read_data(folder)
        assert data.fixed[0].shape == (300, 440) and data.test[0].shape == (40, 440) and not data.voices.any()
        assert len(data.names) <= 40 and {"_", "i:", "s"} <= set(data.names)
        o = types.SimpleNamespace(data=folder, network="mixture", experts=[4, 16], hidden=[128, 128],
                                  gate_hidden=[64, 64], gate="softmax", losses=None, epochs=2, fine_tune=1, margin=100,
                                  batch=100, rate=0.03, momentum=0.9, weight_decay=0.0, seed=1)
        network, report = digits.train(o, lambda text: None)
        assert {tuple(w.shape) for name, w in network.weights.items() if "experts.weight" in name} == {
            (4 * 128, 440), (16 * 128, 128)}
        assert np.shape(report["gates"][1]["combinations"]) == (4, 16) and report["gates"][0]["voice_bits"] == 0
        digits.save(network, path("model.pt"), report)
        convert.convert(types.SimpleNamespace(
            input=path("model.pt"), output=path("model.bin"), licence="", attribution="", spm="", preset=None,
            type="f32", meta=[], description="", layout="moe", name="x", like=None, experts=None, shortlist=None,
            ids_only=True, vocab=None, bpe=None))
        wanted = ref.load(path("model.bin"), torch.float64).classify(data.test[0].double())
        got = subprocess.run([CLASSIFY, "-m", path("model.bin"), "--json", path("test-images-idx3-ubyte")],
                             stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()
        assert len(got) == 40
        for line, row in zip(map(json.loads, got), wanted):
            assert line["class"] == int(row.argmax()) and line["name"] == data.names[line["class"]]
            assert abs(line["logprob"] - float(row.max())) < 1e-4


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
