"""ik_llama.cpp for `peers_files.py`: a small C++ program over its library, built from a folder of its source."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

CMAKE = """
cmake_minimum_required(VERSION 3.16)
project(peer LANGUAGES C CXX)
add_subdirectory({source} llama EXCLUDE_FROM_ALL)
add_executable(peer peer.cpp)
target_link_libraries(peer PRIVATE llama)
"""
PROGRAM = r"""
#include <sched.h>
#include <time.h>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <vector>
#include "llama.h"

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

int main(int argc, char ** argv) {  // MODEL IDS ["load"]
    std::ifstream file(argv[2]);
    std::vector<llama_token> ids;
    for (char c; file.get(c);)
        if (c >= '0' && c <= '9') {
            int id;
            file.unget();
            file >> id;
            ids.push_back(id);
        }
    cpu_set_t cpus;
    sched_getaffinity(0, sizeof cpus, &cpus);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return 1;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = ids.size() + 256;
    params.n_batch = params.n_ubatch = 512;
    params.n_threads = params.n_threads_batch = CPU_COUNT(&cpus);
    llama_context * context = llama_init_from_model(model, params);
    if (!context) return 1;
    const int size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(512, 0, 1);
    int position = 0;
    auto next_after = [&](const llama_token * tokens, int count) {
        for (int first = 0; first < count; first += 512) {
            batch.n_tokens = std::min(512, count - first);
            for (int row = 0; row < batch.n_tokens; row++) {
                batch.token[row] = tokens[first + row];
                batch.pos[row] = position++;
                batch.n_seq_id[row] = 1;
                batch.seq_id[row][0] = 0;
                batch.logits[row] = row == batch.n_tokens - 1;
            }
            if (llama_decode(context, batch)) exit(1);
        }
        const float * logits = llama_get_logits_ith(context, batch.n_tokens - 1);
        return (llama_token) (std::max_element(logits, logits + size) - logits);
    };
    if (argc > 3) {
        printf("{\"cpu\": %.6f, \"modules\": []}\n", now(CLOCK_PROCESS_CPUTIME_ID));
        return 0;
    }
    const double loaded = now(CLOCK_REALTIME);
    llama_token token = next_after(ids.data(), ids.size());
    const double first = now(CLOCK_REALTIME);
    for (int step = 0; step < 99; step++) token = next_after(&token, 1);
    printf("{\"loaded\": %.6f, \"first\": %.6f, \"last\": %.6f}\n", loaded, first, now(CLOCK_REALTIME));
}
"""


def build(source: Path, folder: Path, avx2: bool) -> Path:
    """Build the program in the folder, if it is not there: for this CPU, or for AVX2 alone. Raises FileNotFoundError
    without CMake or a C++ compiler, CalledProcessError with the compiler's messages."""
    target = folder / "build/peer"
    if target.exists():
        return target
    if lacking := [names[0] for names in (("cmake",), ("c++", "g++", "clang++")) if not any(map(shutil.which, names))]:
        raise FileNotFoundError(f"ik_llama.cpp is not built: {' and '.join(lacking)} not found")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "CMakeLists.txt").write_text(CMAKE.format(source=source.resolve()), encoding="utf-8")
    (folder / "peer.cpp").write_text(PROGRAM, encoding="utf-8")
    options = {
        "CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "OFF", "GGML_NATIVE": "OFF" if avx2 else "ON", "GGML_AVX2": "ON",
        "GGML_CUDA": "OFF", "LLAMA_CURL": "OFF", "LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_SERVER": "OFF", "LLAMA_BUILD_TOOLS": "OFF", "LLAMA_BUILD_COMMON": "OFF",
    }  # fmt: skip
    if not avx2:
        del options["GGML_AVX2"]
    given = [f"-D{name}={value}" for name, value in options.items()]
    output = {"check": True, "capture_output": True, "text": True}
    subprocess.run(["cmake", "-S", str(folder), "-B", str(target.parent), *given], **output)
    subprocess.run(
        ["cmake", "--build", str(target.parent), "--target", "peer", "--parallel", str(os.cpu_count())], **output
    )
    return target
