// A stand-in for the GPU driver: it answers as the driver does, runs nothing, and writes down every call.
//
// KVGEN_STANDIN_LOG names the file of calls, a JSON line each; KVGEN_STANDIN_FAIL = "cuModuleLoadData:209" makes
// that function fail with that error; KVGEN_STANDIN_CC = "80" is the compute capability, 90 otherwise. Device time
// advances by 10 us a launch and 1 us a mark. Parameters are read as the driver does: how many and how wide says the cubin itself.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

struct Fun {
  std::string name;
  std::map<int, int> sizes;  // bytes by ordinal
  int dynamic = 48 * 1024;
};
struct Mod {
  std::string image;
};
struct Mark {
  double ms = -1;
};
double now_ms = 0;
bool ready = false, current = false;

template <typename T>
T at(const std::string& data, size_t offset) {
  T value{};
  if (offset + sizeof(T) <= data.size()) std::memcpy(&value, data.data() + offset, sizeof(T));
  return value;
}

void note(const std::string& line) {
  if (const char* path = std::getenv("KVGEN_STANDIN_LOG")) {
    if (FILE* file = std::fopen(path, "a")) {
      std::fprintf(file, "%s\n", line.c_str());
      std::fclose(file);
    }
  }
}

int enter(const char* name, const std::string& facts = "") {
  note(std::string("{\"call\": \"") + name + "\"" + (facts.empty() ? "" : ", " + facts) + "}");
  const char* fail = std::getenv("KVGEN_STANDIN_FAIL");
  const size_t length = std::strlen(name);
  if (fail && std::strncmp(fail, name, length) == 0 && fail[length] == ':') return std::atoi(fail + length + 1);
  if (!ready && std::strcmp(name, "cuInit") != 0) return 3;
  return 0;
}

std::string number(const char* key, long long value) { return std::string("\"") + key + "\": " + std::to_string(value); }

// The parameters of a kernel, from the cubin's section .nv.info.<kernel>.
bool parameters(const std::string& elf, const std::string& kernel, std::map<int, int>& sizes) {
  const auto table = at<uint64_t>(elf, 0x28);
  const auto step = at<uint16_t>(elf, 0x3A), count = at<uint16_t>(elf, 0x3C), names_at = at<uint16_t>(elf, 0x3E);
  const auto names = at<uint64_t>(elf, table + names_at * step + 24);
  bool found = false;
  for (int i = 0; i < count; ++i) {
    const size_t row = table + i * step;
    const std::string name(elf.c_str() + names + at<uint32_t>(elf, row));
    if (name == ".text." + kernel) found = true;
    if (name != ".nv.info." + kernel) continue;
    const size_t first = at<uint64_t>(elf, row + 24), end = first + at<uint64_t>(elf, row + 32);
    for (size_t p = first; p + 4 <= end;) {
      const int form = at<uint8_t>(elf, p), kind = at<uint8_t>(elf, p + 1), length = at<uint16_t>(elf, p + 2);
      p += 4;
      if (form != 4) continue;
      if (kind == 0x17) sizes[at<uint16_t>(elf, p + 4)] = at<uint32_t>(elf, p + 8) >> 18;
      p += length;
    }
  }
  return found;
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
  ready = true;
  return enter("cuInit");
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return enter("cuDriverGetVersion");
}
int cuGetErrorName(int error, const char** text) {
  *text = error == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : error == 3 ? "CUDA_ERROR_NOT_INITIALIZED" :
          error == 500 ? "CUDA_ERROR_NOT_FOUND" : nullptr;
  return *text ? 0 : 1;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == 209 ? "no kernel image is available for execution on the device"
          : error == 3 ? "initialization error"
          : error == 500 ? "named symbol not found"
                       : nullptr;
  return *text ? 0 : 1;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return enter("cuDeviceGet", number("ordinal", ordinal));
}
int cuDeviceGetName(char* name, int size, int) {
  std::snprintf(name, size, "Stand-in GPU");
  return enter("cuDeviceGetName");
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const char* given = std::getenv("KVGEN_STANDIN_CC");
  const int cc = given ? std::atoi(given) : 90;
  *value = attribute == 75 ? cc / 10 : attribute == 76 ? cc % 10 : attribute == 16 ? 132 : attribute == 38 ? 1 << 20 : 232448;
  return enter("cuDeviceGetAttribute", number("attribute", attribute));
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)0xC0;
  return enter("cuDevicePrimaryCtxRetain", number("device", device));
}
int cuCtxSetCurrent(void* context) {
  current = context == (void*)0xC0;
  return current ? 0 : enter("cuCtxSetCurrent");
}
int cuCtxSynchronize() { return enter("cuCtxSynchronize"); }
int cuModuleLoadData(void** module, const void* image) {
  if (!current) return 201;
  // The file's size: the section table of a cubin is followed by the program headers, or ends it.
  std::string head((const char*)image, 64);
  const size_t sections = at<uint64_t>(head, 0x28) + at<uint16_t>(head, 0x3A) * at<uint16_t>(head, 0x3C);
  const size_t programs = at<uint64_t>(head, 0x20) + at<uint16_t>(head, 0x36) * at<uint16_t>(head, 0x38);
  const size_t size = sections > programs ? sections : programs;
  *module = new Mod{std::string((const char*)image, size)};
  return enter("cuModuleLoadData", number("bytes", (long long)size));
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  auto* made = new Fun{name, {}};
  const bool found = parameters(((Mod*)module)->image, name, made->sizes);
  *function = made;
  const int status = enter("cuModuleGetFunction", std::string("\"name\": \"") + name + "\"");
  return status ? status : found ? 0 : 500;
}
int cuModuleUnload(void*) { return enter("cuModuleUnload"); }
int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (attribute == 8) ((Fun*)function)->dynamic = value;
  return enter("cuFuncSetAttribute", "\"name\": \"" + ((Fun*)function)->name + "\", " + number("attribute", attribute) +
                                         ", " + number("value", value));
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
  const Fun& f = *(Fun*)function;
  if (!current || extra || (int)shared > f.dynamic) return 1;
  std::string bytes;
  for (const auto& [ordinal, size] : f.sizes) {
    bytes += bytes.empty() ? "" : " ";
    for (int i = 0; i < size; ++i) {
      char hex[3];
      std::snprintf(hex, 3, "%02x", ((const unsigned char*)parameters[ordinal])[i]);
      bytes += hex;
    }
  }
  char facts[200];
  std::snprintf(facts, 200, "\"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, \"stream\": %llu", gx, gy, gz,
                bx, by, bz, shared, (unsigned long long)(uintptr_t)stream);
  now_ms += 0.01;
  return enter("cuLaunchKernel", "\"name\": \"" + f.name + "\", " + facts + ", \"parameters\": \"" + bytes + "\"");
}
int cuEventCreate(void** event, unsigned) {
  *event = new Mark;
  return 0;
}
int cuEventRecord(void* event, void*) {
  ((Mark*)event)->ms = now_ms += 0.001;
  return enter("cuEventRecord");
}
int cuEventSynchronize(void*) { return enter("cuEventSynchronize"); }
int cuEventElapsedTime(float* ms, void* start, void* end) {
  const double a = ((Mark*)start)->ms, b = ((Mark*)end)->ms;
  *ms = (float)(b - a);
  return a < 0 || b < 0 ? 400 : enter("cuEventElapsedTime");
}
int cuEventDestroy_v2(void* event) {
  delete (Mark*)event;
  return enter("cuEventDestroy");
}

}  // extern "C"
