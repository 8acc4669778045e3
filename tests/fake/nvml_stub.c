/* A stand-in for libnvidia-ml.so.1: its GPUs are lines of the text file that FAKE_NVML_STATE names, read anew at every
 * call, and memory that living processes claim in files of the folder "<that file>.claims".
 *
 * State file, one fact a line, words split by one space; what is absent is answered with "not supported":
 *   driver 570.86.15 | cuda 12080 | error FUNCTION CODE | delay FUNCTION MILLISECONDS   (before the first gpu: of all)
 *   gpu UUID            starts a GPU; the lines below are of it
 *   mig UUID            starts a MIG device of the last gpu
 *   name TEXT | pci BUS_ID | memory TOTAL USED RESERVED | capability MAJOR MINOR | ecc 0|1 | migmode 0|1
 *   power MILLIWATTS | nvlink LINKS ACTIVE | instance GI CI SLICES | process PID BYTES|- c|g | error … | delay …
 * Claim file: UUID PID START_TICKS BYTES HOLD_MILLISECONDS LISTED(0|1). Bytes of "process" lines and of claims come on
 * top of USED. A claim counts while the process lives (a zombie does not) and HOLD longer; negative: for ever.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef unsigned int uint;
typedef unsigned long long u64;

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9 };
enum { DEVICES = 40, PROCESSES = 64, RULES = 24 };

typedef struct { uint pid; u64 bytes; int is_known, is_graphics; } Process;
typedef struct { char function[80]; int code, delay_ms; } Rule;
typedef struct { Rule rules[RULES]; int count; } Rules;
typedef struct {
    char uuid[96], name[96], pci[32];
    int parent; /* -1: a GPU */
    int has_memory, has_capability, ecc, migmode, power, links, active_links, gi, ci, slices;
    u64 total, used, reserved;
    uint major, minor;
    Process processes[PROCESSES];
    int process_count;
    Rules rules;
} Device;
typedef struct {
    char driver[80];
    int cuda, device_count;
    Rules rules;
    Device devices[DEVICES];
} State;

static int initialized = 0;
static _Thread_local State state;

static void add_rule(Rules *rules, const char *line, int is_delay) {
    Rule *rule = &rules->rules[rules->count];
    int number = 0;
    if (rules->count == RULES || sscanf(line, "%*s %79s %d", rule->function, &number) != 2) return;
    rule->code = is_delay ? 0 : number;
    rule->delay_ms = is_delay ? number : 0;
    rules->count++;
}

static void add_process(Device *device, uint pid, u64 bytes, int is_known, int is_graphics, int is_listed) {
    if (is_known) device->used += bytes;
    if (is_listed && device->process_count < PROCESSES)
        device->processes[device->process_count++] = (Process){pid, bytes, is_known, is_graphics};
}

static void read_device_line(Device *device, const char *line) {
    uint pid;
    char amount[40], kind = 'c';
    if (sscanf(line, "name %95[^\n]", device->name) == 1) return;
    else if (sscanf(line, "pci %31s", device->pci) == 1) return;
    else if (sscanf(line, "memory %llu %llu %llu", &device->total, &device->used, &device->reserved) == 3)
        device->has_memory = 1;
    else if (sscanf(line, "capability %u %u", &device->major, &device->minor) == 2) device->has_capability = 1;
    else if (sscanf(line, "ecc %d", &device->ecc) == 1) return;
    else if (sscanf(line, "migmode %d", &device->migmode) == 1) return;
    else if (sscanf(line, "power %d", &device->power) == 1) return;
    else if (sscanf(line, "nvlink %d %d", &device->links, &device->active_links) == 2) return;
    else if (sscanf(line, "instance %d %d %d", &device->gi, &device->ci, &device->slices) == 3) return;
    else if (sscanf(line, "process %u %39s %c", &pid, amount, &kind) >= 2)
        add_process(device, pid, strtoull(amount, NULL, 10), amount[0] != '-', kind == 'g', 1);
    else if (!strncmp(line, "error ", 6)) add_rule(&device->rules, line, 0);
    else if (!strncmp(line, "delay ", 6)) add_rule(&device->rules, line, 1);
}

static Device *begin_device(const char *line, int last_gpu) {
    if (state.device_count == DEVICES) return NULL;
    Device *device = &state.devices[state.device_count++];
    device->parent = line[0] == 'm' ? last_gpu : -1;
    device->ecc = device->migmode = device->power = device->links = device->gi = device->ci = -1;
    sscanf(line, "%*s %95s", device->uuid);
    return device;
}

static u64 start_ticks(uint pid, char *life) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return 0;
    text[length] = 0;
    char *rest = strrchr(text, ')');
    u64 ticks = 0;
    if (!rest || sscanf(rest, ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", life,
                        &ticks) != 2)
        return 0;
    return ticks;
}

/* Milliseconds since somebody first saw that the claim's process is dead. */
static long dead_for(const char *claim) {
    char path[4500];
    struct stat seen;
    struct timespec now;
    snprintf(path, sizeof path, "%s.dead", claim);
    if (stat(path, &seen)) {
        int file = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
        if (file >= 0) close(file);
        return 0;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    return (now.tv_sec - seen.st_mtim.tv_sec) * 1000 + (now.tv_nsec - seen.st_mtim.tv_nsec) / 1000000;
}

static void read_claim(const char *path) {
    char uuid[96], life = 0;
    uint pid;
    u64 born, bytes;
    long hold;
    int is_listed;
    FILE *file = fopen(path, "re");
    if (!file) return;
    int words = fscanf(file, "%95s %u %llu %llu %ld %d", uuid, &pid, &born, &bytes, &hold, &is_listed);
    fclose(file);
    if (words != 6) return;
    int is_alive = start_ticks(pid, &life) == born && life != 'Z' && life != 'X';
    if (!is_alive && hold >= 0 && dead_for(path) >= hold) return;
    for (int i = 0; i < state.device_count; i++)
        if (!strcmp(state.devices[i].uuid, uuid)) {
            add_process(&state.devices[i], pid, bytes, 1, 0, is_alive && is_listed);
            int parent = state.devices[i].parent;
            if (parent >= 0) state.devices[parent].used += bytes;
        }
}

static void read_claims(const char *state_path) {
    char folder[4096], path[4400];
    snprintf(folder, sizeof folder, "%s.claims", state_path);
    DIR *entries = opendir(folder);
    if (!entries) return;
    for (struct dirent *entry; (entry = readdir(entries));) {
        size_t length = strlen(entry->d_name);
        if (length < 6 || strcmp(entry->d_name + length - 6, ".claim")) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        read_claim(path);
    }
    closedir(entries);
}

static int read_state(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "re") : NULL;
    char line[512];
    Device *device = NULL;
    int last_gpu = -1;
    memset(&state, 0, sizeof state);
    if (!file) return NO_DRIVER;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, "gpu ", 4) || !strncmp(line, "mig ", 4)) {
            device = begin_device(line, last_gpu);
            if (!device) break;
            if (device->parent < 0) last_gpu = state.device_count - 1;
        } else if (device) read_device_line(device, line);
        else if (!strncmp(line, "error ", 6)) add_rule(&state.rules, line, 0);
        else if (!strncmp(line, "delay ", 6)) add_rule(&state.rules, line, 1);
        else if (sscanf(line, "cuda %d", &state.cuda) != 1) sscanf(line, "driver %79s", state.driver);
    }
    fclose(file);
    read_claims(path);
    return OK;
}

static int obey(const Rules *rules, const char *function) {
    int code = OK;
    for (int i = 0; i < rules->count; i++) {
        if (strcmp(rules->rules[i].function, function)) continue;
        if (rules->rules[i].delay_ms) usleep(1000u * (uint)rules->rules[i].delay_ms);
        if (rules->rules[i].code) code = rules->rules[i].code;
    }
    return code;
}

static int enter(const char *function) {
    int code = read_state();
    if (code == OK) code = obey(&state.rules, function);
    return code != OK || initialized > 0 ? code : UNINITIALIZED;
}

static int enter_device(const char *function, void *handle, Device **device) {
    int code = enter(function);
    size_t number = (size_t)handle;
    if (code != OK) return code;
    if (number < 1 || number > (size_t)state.device_count) return INVALID;
    *device = &state.devices[number - 1];
    return obey(&(*device)->rules, function);
}

#define ENTER() do { int code_ = enter(__func__); if (code_ != OK) return code_; } while (0)
#define ENTER_DEVICE() \
    Device *device; \
    do { int code_ = enter_device(__func__, handle, &device); if (code_ != OK) return code_; } while (0)
#define NEED(fact) do { if (!(fact)) return NOT_SUPPORTED; } while (0)

static void *handle_of(int number) { return (void *)(size_t)(number + 1); }

static int copy(char *to, uint size, const char *text) {
    if (strlen(text) >= size) return TOO_SMALL;
    strcpy(to, text);
    return OK;
}

/* --- the library ------------------------------------------------------------------------------------------------- */

int nvmlInitWithFlags(uint flags) {
    (void)flags;
    int code = read_state();
    if (code == OK) code = obey(&state.rules, __func__);
    if (code == OK) initialized++;
    return code;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (initialized <= 0) return UNINITIALIZED;
    initialized--;
    return OK;
}

const char *nvmlErrorString(int code) {
    switch (code) {
        case OK: return "Success";
        case UNINITIALIZED: return "Uninitialized";
        case INVALID: return "Invalid Argument";
        case NOT_SUPPORTED: return "Not Supported";
        case 4: return "Insufficient Permissions";
        case NOT_FOUND: return "Not Found";
        case TOO_SMALL: return "Insufficient Size";
        case NO_DRIVER: return "Driver Not Loaded";
        case 15: return "GPU is lost";
        case 18: return "Driver/library version mismatch";
        default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, uint size) {
    ENTER();
    NEED(state.driver[0]);
    return copy(version, size, state.driver);
}

int nvmlSystemGetNVMLVersion(char *version, uint size) {
    ENTER();
    NEED(state.driver[0]);
    return copy(version, size, state.driver);
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    ENTER();
    NEED(state.cuda);
    *version = state.cuda;
    return OK;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER();
    NEED(state.cuda);
    *version = state.cuda;
    return OK;
}

int nvmlDeviceGetCount_v2(uint *count) {
    ENTER();
    *count = 0;
    for (int i = 0; i < state.device_count; i++) *count += state.devices[i].parent < 0;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(uint index, void **handle) {
    ENTER();
    for (int i = 0; i < state.device_count; i++)
        if (state.devices[i].parent < 0 && index-- == 0) {
            *handle = handle_of(i);
            return obey(&state.devices[i].rules, __func__);
        }
    return INVALID;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    ENTER();
    for (int i = 0; i < state.device_count; i++)
        if (!strcmp(state.devices[i].uuid, uuid)) {
            *handle = handle_of(i);
            return obey(&state.devices[i].rules, __func__);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **handle) {
    ENTER();
    for (int i = 0; i < state.device_count; i++)
        if (state.devices[i].parent < 0 && !strcasecmp(state.devices[i].pci, pci)) {
            *handle = handle_of(i);
            return OK;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(void *handle, uint *index) {
    ENTER_DEVICE();
    *index = 0;
    for (Device *other = state.devices; other < device; other++) *index += other->parent < 0;
    return OK;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, uint size) {
    ENTER_DEVICE();
    return copy(uuid, size, device->uuid);
}

int nvmlDeviceGetName(void *handle, char *name, uint size) {
    ENTER_DEVICE();
    NEED(device->name[0]);
    return copy(name, size, device->name);
}

typedef struct { u64 total, free, used; } Memory;
typedef struct { uint version; u64 total, reserved, free, used; } MemoryV2;

int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    ENTER_DEVICE();
    NEED(device->has_memory);
    u64 used = device->used + device->reserved;
    *memory = (Memory){device->total, used < device->total ? device->total - used : 0, used};
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *memory) {
    ENTER_DEVICE();
    NEED(device->has_memory);
    u64 taken = device->used + device->reserved;
    memory->total = device->total;
    memory->reserved = device->reserved;
    memory->used = device->used;
    memory->free = taken < device->total ? device->total - taken : 0;
    return OK;
}

typedef struct { char legacy[16]; uint domain, bus, device, pci_device, pci_subsystem; char bus_id[32]; } Pci;

int nvmlDeviceGetPciInfo_v3(void *handle, Pci *pci) {
    ENTER_DEVICE();
    NEED(device->pci[0]);
    memset(pci, 0, sizeof *pci);
    sscanf(device->pci, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%s", device->pci);
    snprintf(pci->legacy, sizeof pci->legacy, "%04x:%02x:%02x.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    ENTER_DEVICE();
    NEED(device->has_capability);
    *major = (int)device->major;
    *minor = (int)device->minor;
    return OK;
}

int nvmlDeviceGetEccMode(void *handle, uint *current, uint *pending) {
    ENTER_DEVICE();
    NEED(device->ecc >= 0);
    *current = *pending = (uint)device->ecc;
    return OK;
}

static int power(const char *function, void *handle, uint *milliwatts) {
    Device *device;
    int code = enter_device(function, handle, &device);
    if (code != OK) return code;
    NEED(device->power >= 0);
    *milliwatts = (uint)device->power;
    return OK;
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, uint *limit) { return power(__func__, handle, limit); }
int nvmlDeviceGetPowerManagementLimit(void *handle, uint *limit) { return power(__func__, handle, limit); }
int nvmlDeviceGetPowerManagementDefaultLimit(void *handle, uint *limit) { return power(__func__, handle, limit); }

int nvmlDeviceGetNvLinkState(void *handle, uint link, uint *is_active) {
    ENTER_DEVICE();
    NEED(device->links >= 0);
    if (link >= (uint)device->links) return INVALID;
    *is_active = link < (uint)device->active_links;
    return OK;
}

typedef struct { uint gpu, memory; } Utilization;

int nvmlDeviceGetUtilizationRates(void *handle, Utilization *rates) {
    ENTER_DEVICE();
    NEED(device->parent < 0);
    *rates = (Utilization){device->process_count ? 100 : 0, 0};
    return OK;
}

/* --- MIG --------------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetMigMode(void *handle, uint *current, uint *pending) {
    ENTER_DEVICE();
    NEED(device->migmode >= 0);
    *current = *pending = (uint)device->migmode;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, uint *count) {
    ENTER_DEVICE();
    *count = device->migmode >= 0 ? 7 : 0;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, uint index, void **mig) {
    ENTER_DEVICE();
    for (int i = 0; i < state.device_count; i++)
        if (state.devices[i].parent == (int)(device - state.devices) && index-- == 0) {
            *mig = handle_of(i);
            return OK;
        }
    return NOT_FOUND;
}

int nvmlDeviceIsMigDeviceHandle(void *handle, uint *is_mig) {
    ENTER_DEVICE();
    *is_mig = device->parent >= 0;
    return OK;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **parent) {
    ENTER_DEVICE();
    if (device->parent < 0) return INVALID;
    *parent = handle_of(device->parent);
    return OK;
}

int nvmlDeviceGetGpuInstanceId(void *handle, uint *id) {
    ENTER_DEVICE();
    NEED(device->gi >= 0);
    *id = (uint)device->gi;
    return OK;
}

int nvmlDeviceGetComputeInstanceId(void *handle, uint *id) {
    ENTER_DEVICE();
    NEED(device->ci >= 0);
    *id = (uint)device->ci;
    return OK;
}

typedef struct { uint sms, copies, decoders, encoders, jpegs, ofas, gi_slices, ci_slices; u64 memory_mb; } Attributes;

int nvmlDeviceGetAttributes_v2(void *handle, Attributes *attributes) {
    ENTER_DEVICE();
    NEED(device->parent >= 0 && device->has_memory);
    memset(attributes, 0, sizeof *attributes);
    attributes->gi_slices = attributes->ci_slices = (uint)device->slices;
    attributes->memory_mb = device->total >> 20;
    return OK;
}

/* --- processes --------------------------------------------------------------------------------------------------- */

typedef struct { uint pid; u64 used; uint gi, ci; } ProcessInfo;

static int processes(const char *function, void *handle, uint *count, ProcessInfo *infos, int is_graphics) {
    Device *device;
    int code = enter_device(function, handle, &device);
    uint found = 0, room = *count;
    if (code != OK) return code;
    for (int i = 0; i < device->process_count; i++) {
        Process *process = &device->processes[i];
        if (process->is_graphics != is_graphics) continue;
        if (infos && found < room)
            infos[found] = (ProcessInfo){process->pid, process->is_known ? process->bytes : ~0ull, ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > room ? TOO_SMALL : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, uint *count, ProcessInfo *infos) {
    return processes(__func__, handle, count, infos, 0);
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, uint *count, ProcessInfo *infos) {
    return processes(__func__, handle, count, infos, 0);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, uint *count, ProcessInfo *infos) {
    return processes(__func__, handle, count, infos, 1);
}
int nvmlDeviceGetGraphicsRunningProcesses_v2(void *handle, uint *count, ProcessInfo *infos) {
    return processes(__func__, handle, count, infos, 1);
}

int nvmlSystemGetProcessName(uint pid, char *name, uint size) {
    ENTER();
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *file = fopen(path, "re");
    if (!file) return NOT_FOUND;
    char *read = fgets(name, (int)size, file);
    fclose(file);
    if (!read) return NOT_FOUND;
    name[strcspn(name, "\n")] = 0;
    return OK;
}
