set -euo pipefail
: "${WEIGHTS:?set it to the folder of the weights}"
cat > trtllm.yaml <<'END'
enable_attention_dp: true
kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.65, enable_block_reuse: false}
enable_chunked_prefill: true
stream_interval: 4
print_iter_log: true
cuda_graph_config:
  enable_padding: true
  batch_sizes: [1, 2, 4, 8, 16, 32, 64, 128, 256, 384]
END
trtllm-bench --model "$WEIGHTS" prepare-dataset --output dataset.jsonl --random-seed 1234 token-norm-dist --num-requests 30720 --input-mean 1000 --output-mean 1000 --input-stdev 0 --output-stdev 0
exec trtllm-bench --model DeepSeek-R1 --model_path "$WEIGHTS" throughput --backend pytorch --tp 8 --ep 8 --pp 2 --dataset dataset.jsonl --max_batch_size 384 --max_num_tokens 3000 --num_requests 30720 --concurrency 3072 --warmup 0 --extra_llm_api_options trtllm.yaml --streaming
