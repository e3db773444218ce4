// The processors this process may use: affinity mask, cgroup CPU limit.
#pragma once
#include <string>
#include <vector>

namespace rapidmoe {

// Processors of this process's affinity mask, ascending; as it stood when first asked.
const std::vector<int>& affinity_cpus();

// Processors of the machine, whatever this process may use of it.
int online_cpus();

// CPUs' worth of time that the cgroup whose files lie in `folder` allows (cgroup v2 cpu.max), rounded up; 0 = no limit.
int cgroup_cpus(const std::string& folder);

// The default size of the pool: cores of the affinity mask, no more than the cgroup's limit.
int available_cores();

// Pin the calling thread, worker `index` of the pool, to one processor of the mask. The first processor is left to the
// caller of the pool. Does nothing with RAPIDMOE_PIN=0, or where the mask has fewer than four processors: there the
// scheduler does better, since XLA's threads work on the same ones (a decode step of the demo model on two: 12 % less).
void pin_worker(int index);

}  // namespace rapidmoe
