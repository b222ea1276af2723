set -euo pipefail
: "${WEIGHTS:?set it to the folder of the weights}"
cat > trtllm.yaml <<'END'
enable_attention_dp: true
kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.85, enable_block_reuse: false}
enable_chunked_prefill: true
stream_interval: 4
print_iter_log: true
cuda_graph_config:
  enable_padding: true
  batch_sizes: [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 786]
END
trtllm-bench --model "$WEIGHTS" prepare-dataset --output dataset.jsonl --random-seed 1234 token-norm-dist --num-requests 31440 --input-mean 1000 --output-mean 1000 --input-stdev 0 --output-stdev 0
exec trtllm-bench --model DeepSeek-R1 --model_path "$WEIGHTS" throughput --backend pytorch --tp 4 --ep 4 --pp 1 --dataset dataset.jsonl --max_batch_size 786 --max_num_tokens 5000 --num_requests 31440 --concurrency 3144 --warmup 0 --extra_llm_api_options trtllm.yaml --streaming
