#!/usr/bin/env python3
"""Generate frames of speech for train-digits.py, as in section 4.2 of Deep MoE
(Eigen et al. 2013, arXiv 1312.4314): examples of 11 frames, 10 ms apart, with
40 frequency bands each, and one of 40 phonemes as the class.

The paper's recordings were never published. Here espeak-ng reads sentences and
reports when each phoneme begins. A frame is the log power in 40 mel bands over
a window of 25 ms; every band is normalised to mean 1/2 and standard deviation
1/6, clipped and rounded to a byte. The class of 11 frames is the phoneme in the
middle of the sixth frame. The 40 most frequent phonemes are used; all pauses
are one phoneme.

TEXT is a table in the format of tools/train/data.py; the --voices take turns
reading the sentences of --column. One sentence in ten is for testing.

Files in --out: {train,test}-images-idx3-ubyte [N, 11, 40] and
{train,test}-labels-idx1-ubyte in MNIST's IDX format, which moe-classify reads;
test-voices-idx1-ubyte; phonemes.txt, the names of the classes.
"""
import common  # must be imported first to extend sys.path and report missing modules
import argparse
import collections
import ctypes
import ctypes.util
import os

import numpy as np

import data

BANDS, CONTEXT, PHONEMES = 40, 11, 40
WINDOW, STEP = 0.025, 0.01  # seconds
PAUSE = "_"
VOICES = "en-us+m1", "en-us+m3", "en-us+m7", "en-us+f1", "en-us+f2", "en-us+f4"


# ---- Espeak ----------------------------------------------------------------------------------------------------------

class Event(ctypes.Structure):
    """espeak_EVENT of speak_lib.h."""
    _fields_ = [("type", ctypes.c_int), ("unique", ctypes.c_uint), ("text", ctypes.c_int), ("length", ctypes.c_int),
                ("milliseconds", ctypes.c_int), ("sample", ctypes.c_int), ("user", ctypes.c_void_p),
                ("phoneme", ctypes.c_char * 8)]


class Espeak:
    END, PHONEME, SYNCHRONOUS, EVENTS, UTF8 = 0, 7, 2, 1, 1  # constants of speak_lib.h

    def __init__(self):
        try:
            self.library = ctypes.CDLL(ctypes.util.find_library("espeak-ng") or "libespeak-ng.so.1")
        except OSError:
            raise SystemExit("espeak-ng is missing: tools/install-deps --train installs it") from None
        self.rate = self.library.espeak_Initialize(self.SYNCHRONOUS, 0, None, self.EVENTS)
        if self.rate <= 0:
            raise SystemExit("cannot initialise espeak-ng: is espeak-ng-data installed?")
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(Event))
        self.callback = kind(self.take)
        self.library.espeak_SetSynthCallback(self.callback)

    def take(self, wave, count, events):
        """Store a chunk of sound and its events (callback for espeak-ng)."""
        i = 0
        while events[i].type != self.END:
            if events[i].type == self.PHONEME:
                self.begins.append((events[i].milliseconds / 1000, events[i].phoneme.decode()))
            i += 1
        if count:
            self.wave.append(np.ctypeslib.as_array(wave, (count,)).astype(np.float64) / 32768)
        return 0

    def say(self, text, voice):
        """Speak a sentence; return (samples in -1 .. 1, [(start in seconds, phoneme)])."""
        if self.library.espeak_SetVoiceByName(voice.encode()):
            raise SystemExit(f"espeak-ng has no voice {voice}; espeak-ng --voices lists them")
        self.wave, self.begins, bytes_of = [np.zeros(0)], [], text.encode()
        self.library.espeak_Synth(bytes_of, len(bytes_of) + 1, 0, 0, 0, self.UTF8, None, None)
        return np.concatenate(self.wave), self.begins


# ---- Frames ----------------------------------------------------------------------------------------------------------

def mel(frequency):
    return 1127 * np.log1p(frequency / 700)


def mel_filters(rate, size, low=64.0, high=8000.0):
    """Return triangular filters [BANDS, size / 2 + 1] over the frequencies of a Fourier transform of `size` samples.
    Centres are equidistant in mel, and each triangle extends to the centres of its neighbours."""
    corners = 700 * np.expm1(np.linspace(mel(low), mel(high), BANDS + 2) / 1127)
    frequency = np.arange(size // 2 + 1) * rate / size
    left, middle, right = (corners[i:i + BANDS, None] for i in range(3))
    return np.minimum((frequency - left) / (middle - left), (right - frequency) / (right - middle)).clip(min=0)


def log_mel(wave, rate):
    """Return the log power [frames, BANDS] of windows 10 ms apart."""
    length, count = round(WINDOW * rate), max(0, int((len(wave) / rate - WINDOW) / STEP) + 1)
    size = 1 << (length - 1).bit_length()
    begin = np.round(np.arange(count) * STEP * rate).astype(int)
    windows = wave[begin[:, None] + np.arange(length)] * np.hamming(length)
    return np.log(np.abs(np.fft.rfft(windows, size)) ** 2 @ mel_filters(rate, size).T + 1e-6)


def phoneme_of_frames(begins, count):
    """Return the phoneme in the middle of each frame, with all of espeak-ng's names for pauses unified."""
    middle = np.arange(count) * STEP + WINDOW / 2
    at = np.searchsorted([second for second, _ in begins], middle, side="right") - 1
    names = [PAUSE if name.startswith("_") else name for _, name in begins]
    return [names[i] if i >= 0 else PAUSE for i in at]


def with_context(frames):
    """Return sliding windows over frames: [frames, BANDS] -> [frames - CONTEXT + 1, CONTEXT, BANDS]."""
    return np.lib.stride_tricks.sliding_window_view(frames, CONTEXT, 0).transpose(0, 2, 1)


def to_bytes(frames, mean, deviation):
    return np.clip(np.rint(255 * (0.5 + (frames - mean) / (6 * deviation))), 0, 255).astype(np.uint8)


# ---- Files -----------------------------------------------------------------------------------------------------------

def write_idx(path, array):
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    with open(path, "wb") as file:
        file.write(bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes())


def make(o):
    espeak, random = Espeak(), np.random.default_rng(1)
    sentences = list(dict.fromkeys(x for x in data.read_table(o.text)[o.column] if x))[:o.sentences]
    spoken = []  # frames, phonemes, voice of each sentence
    for i, text in enumerate(sentences):
        wave, begins = espeak.say(text, o.voices[i % len(o.voices)])
        frames = log_mel(wave, espeak.rate)
        if len(frames) >= CONTEXT:
            spoken.append((frames, phoneme_of_frames(begins, len(frames)), i % len(o.voices)))
    held_out = len(spoken) // 10
    parts = {"test": spoken[:held_out], "train": spoken[held_out:]}
    if not held_out:
        raise SystemExit(f"{o.text} has {len(spoken)} usable sentences; at least ten are required")
    seen = np.concatenate([frames for frames, _, _ in parts["train"]])
    mean, deviation = seen.mean(0), seen.std(0)
    common = collections.Counter(name for _, names, _ in parts["train"] for name in names).most_common(PHONEMES)
    number = {name: i for i, name in enumerate(sorted(name for name, _ in common))}
    os.makedirs(o.out, exist_ok=True)
    for part, limit in (("train", o.frames), ("test", o.test_frames)):
        images, labels, voices, half = [], [], [], CONTEXT // 2
        for frames, names, voice in parts[part]:
            label = np.array([number.get(name, -1) for name in names[half:len(names) - half]])
            images.append(with_context(to_bytes(frames, mean, deviation))[label >= 0])
            labels.append(label[label >= 0])
            voices.append(np.full(len(labels[-1]), voice))
        labels = np.concatenate(labels)
        which = random.permutation(len(labels))[:limit]
        write_idx(os.path.join(o.out, part + "-images-idx3-ubyte"), np.concatenate(images)[which])
        write_idx(os.path.join(o.out, part + "-labels-idx1-ubyte"), labels[which])
        if part == "test":
            write_idx(os.path.join(o.out, "test-voices-idx1-ubyte"), np.concatenate(voices)[which])
        print(f"{part}: {len(which)} of {len(labels)} frames, {len(parts[part])} sentences")
    with open(os.path.join(o.out, "phonemes.txt"), "w", encoding="utf-8") as file:
        file.write("".join(name + "\n" for name in number))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="table of sentences, .tsv.xz")
    parser.add_argument("--out", required=True, help="output folder")
    parser.add_argument("--column", default="en", help="column of the table (default: en)")
    parser.add_argument("--voices", nargs="+", default=VOICES, help="names of espeak-ng's voices (default: six)")
    parser.add_argument("--sentences", type=int, default=1800, help="number of sentences (default: 1800)")
    parser.add_argument("--frames", type=int, default=150000, help="maximum of training frames (default: 150000)")
    parser.add_argument("--test-frames", type=int, default=20000, help="maximum of test frames (default: 20000)")
    make(parser.parse_args())


if __name__ == "__main__":
    main()
