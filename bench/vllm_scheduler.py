"""Measure vLLM's scheduler under the loads of engine_scheduler.py, which starts this script.

Runs in an environment with vllm and without fairlead. Reads the loads as JSON from standard input and writes
the result as the last line of standard output.
"""

import gc
import json
import os
import random
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL = Path(__file__).resolve().parents[1] / "src/fairlead/demo/fairlead-demo"


class MeasuredScheduler:
    """A scheduler under one load, with the nanoseconds of its calls."""

    def __init__(self, work: dict[str, Any], load: dict[str, Any], running: int) -> None:
        self.work, self.running, self.lifetime = work, running, load["lifetime"]
        block_size, longest = work["block_size"], work["longest"]
        budget = max(2048, longest, running * (1 + work["prompt_tokens"] // 4))
        blocks = (running + 8) * longest // block_size
        model = ModelConfig(model=str(MODEL), skip_tokenizer_init=True, dtype="float32", seed=1)
        model.max_model_len = longest
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
        cache.num_gpu_blocks = blocks
        config = VllmConfig(
            model_config=model,
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=running + 8,
                max_num_batched_tokens=budget,
                max_model_len=longest,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=False,
            ),
            device_config=DeviceConfig("cpu"),
        )
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=False,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(block_size, sha256)
        self.rng = random.Random(work["seed"])
        self.number = count()
        self.plan_ns = self.commit_ns = self.submit_ns = self.row_steps = self.submitted = 0

    def submit(self, number: int) -> None:
        prompt_tokens, longest = self.work["prompt_tokens"], self.work["longest"]
        for _ in range(number):
            key = next(self.number)
            prompt = self.rng.choices(range(5, 32_000), k=prompt_tokens)
            lifetime = self.lifetime or longest - prompt_tokens
            first = self.lifetime is not None and key < self.running
            began = time.thread_time_ns()
            parameters = SamplingParams(max_tokens=1 + key % lifetime if first else lifetime, ignore_eos=True)
            self.scheduler.add_request(Request(str(key), prompt, parameters, None, block_hasher=self.hasher))
            self.submit_ns += time.thread_time_ns() - began
            self.submitted += 1

    def step(self) -> int:
        """Run one step; return how many requests ended."""
        began = time.thread_time_ns()
        planned_step = self.scheduler.schedule()
        planned = time.thread_time_ns()
        keys = list(planned_step.num_scheduled_tokens)
        model_output = ModelRunnerOutput(
            req_ids=keys,
            req_id_to_index={key: index for index, key in enumerate(keys)},
            sampled_token_ids=[[7] for _ in keys],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        launched = time.thread_time_ns()
        outputs = self.scheduler.update_from_output(planned_step, model_output)
        done = time.thread_time_ns()
        self.plan_ns += planned - began
        self.commit_ns += done - launched
        self.row_steps += len(keys)
        return sum(output.finish_reason is not None for each in outputs.values() for output in each.outputs)

    def run(self) -> None:
        self.submit(self.running)
        for _ in range(self.work["warm_up"]):
            self.submit(self.step())
        self.plan_ns = self.commit_ns = self.submit_ns = self.row_steps = self.submitted = 0
        gc.collect()
        gc.disable()
        for _ in range(self.work["steps"]):
            self.submit(self.step())
        gc.enable()


def main() -> None:
    work = json.load(sys.stdin)
    results = []
    for load in work["loads"]:
        for running in work["running"]:
            measured = MeasuredScheduler(work, load, running)
            measured.run()
            results.append(
                {
                    "load": load["name"],
                    "running": running,
                    "plan_us": measured.plan_ns / 1000 / work["steps"],
                    "commit_us": measured.commit_ns / 1000 / work["steps"],
                    "us_a_running_sequence": (measured.plan_ns + measured.commit_ns)
                    / 1000
                    / measured.row_steps,
                    "submit_us": measured.submit_ns / 1000 / max(1, measured.submitted),
                }
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
