#include "topology.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

namespace rapidmoe {

const std::vector<int>& affinity_cpus() {
  static const std::vector<int> cpus = [] {
    std::vector<int> found;
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0)
      for (int i = 0; i < CPU_SETSIZE; ++i)
        if (CPU_ISSET(i, &set)) found.push_back(i);
    if (found.empty()) found.push_back(0);
    return found;
  }();
  return cpus;
}

int online_cpus() {
  static const int cpus = int(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  return cpus;
}

int cgroup_cpus(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  long quota = 0, period = 0;
  if (!(file >> quota >> period) || quota <= 0 || period <= 0) return 0;  // "max 100000": no limit
  return int((quota + period - 1) / period);
}

int available_cores() {
  const int cores = int(affinity_cpus().size()), limit = cgroup_cpus("/sys/fs/cgroup");
  return limit ? std::min(cores, limit) : cores;
}

void pin_worker(int index) {
  const char* asked = std::getenv("RAPIDMOE_PIN");
  const std::vector<int>& cpus = affinity_cpus();
  if ((asked && *asked == '0') || cpus.size() < 4) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpus[(size_t(index) + 1) % cpus.size()], &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace rapidmoe
