# The CPU kernels' benchmarks; tests/bench/cpu_vs_torch.py and run.sh drive them.
if(ATTN_BUILD_BENCH)
  add_executable(attn_cpu_bench ${CMAKE_CURRENT_LIST_DIR}/cpu_bench.cc)
  target_link_libraries(attn_cpu_bench PRIVATE attn::kernels_cpu attn::kernels_api)

  add_executable(attn_cpu_memory ${CMAKE_CURRENT_LIST_DIR}/cpu_memory.cc)
  target_link_libraries(attn_cpu_memory PRIVATE attn::kernels_cpu attn::kernels_api)
endif()
