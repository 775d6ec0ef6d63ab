// What a step's hooks ask of tensors, generators and groups (native.py builds and loads this; decision 0008).
//
// After a step the caches hold nothing of these objects, nor of the code that asks them. Python asks tensors one after
// another, and waits for memory some six times for each; here the waits overlap, and there is little code.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>

namespace {

struct Seen {
  int64_t version;
  uint64_t pointer;
  int64_t requires_grad;
};

// look(tensors) -> bytes: of each tensor in a list (of nothing else: it is not checked) its version counter, where its
// elements begin, and whether it requires a gradient. RuntimeError where one has no such thing.
PyObject* look(PyObject*, PyObject* list) {
  if (!PyList_CheckExact(list)) {
    PyErr_SetString(PyExc_TypeError, "look() takes a list of tensors");
    return nullptr;
  }
  const Py_ssize_t count = PyList_GET_SIZE(list);
  PyObject* found = PyBytes_FromStringAndSize(nullptr, count * static_cast<Py_ssize_t>(sizeof(Seen)));
  if (found == nullptr) return nullptr;
  auto* seen = reinterpret_cast<Seen*>(PyBytes_AS_STRING(found));
  for (Py_ssize_t i = 0; i < count; i++) __builtin_prefetch(PyList_GET_ITEM(list, i));
  for (Py_ssize_t i = 0; i < count; i++) {
    const auto* impl = reinterpret_cast<const char*>(THPVariable_Unpack(PyList_GET_ITEM(list, i)).unsafeGetTensorImpl());
    for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) __builtin_prefetch(impl + line);
  }
  try {
    for (Py_ssize_t i = 0; i < count; i++) {
      const auto* impl = THPVariable_Unpack(PyList_GET_ITEM(list, i)).unsafeGetTensorImpl();
      seen[i] = {
          static_cast<int64_t>(impl->version_counter().current_version()),
          reinterpret_cast<uint64_t>(impl->data()),
          impl->requires_grad(),
      };
    }
  } catch (const std::exception& e) {
    Py_DECREF(found);
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
  return found;
}

constexpr size_t kWords = 624;

// All that decides on what a generator of torch's draws next.
struct Torch {
  uint64_t seed;
  int64_t left, next, seeded, has_float, has_double;
  double next_double;
  float next_float;
  uint32_t state[kWords];
  uint32_t padding;
};

// Words and position of numpy's or random's generator.
struct Words {
  uint32_t words[kWords + 1];
};

struct Generators {
  Torch torch;
  Words numpy, random;
};

// Whether `now` differs from `seen`, which is `now` afterwards.
template <typename T>
bool moved(const T& now, T& seen) {
  if (std::memcmp(&now, &seen, sizeof(T)) == 0) return false;
  std::memcpy(&seen, &now, sizeof(T));
  return true;
}

// generators(torch, numpy, random, seen) -> int: which have moved since `seen` was written, 1 | 2 | 4; it is written anew.
// `torch` is a torch.Generator, `numpy` and `random` are addresses of words, and nothing of that is checked.
PyObject* generators(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 4 || !PyByteArray_CheckExact(args[3]) || PyByteArray_GET_SIZE(args[3]) != sizeof(Generators)) {
    PyErr_SetString(PyExc_TypeError, "generators() takes a generator, two addresses and a bytearray");
    return nullptr;
  }
  const void* numpy = PyLong_AsVoidPtr(args[1]);
  const void* random = PyLong_AsVoidPtr(args[2]);
  if (PyErr_Occurred() || numpy == nullptr || random == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "there is nothing at address 0");
    return nullptr;
  }
  auto& seen = *reinterpret_cast<Generators*>(PyByteArray_AS_STRING(args[3]));
  Torch now;
  std::memset(&now, 0, sizeof(now));
  try {
    const at::Generator& generator = reinterpret_cast<THPGenerator*>(args[0])->cdata;
    if (generator.device().type() != at::kCPU) throw std::runtime_error("not a generator of the CPU");
    auto* own = generator.get<at::CPUGeneratorImpl>();
    std::lock_guard<std::mutex> lock(own->mutex_);
    const auto data = own->engine().data();
    now.seed = data.seed_;
    now.left = data.left_;
    now.next = data.next_;
    now.seeded = data.seeded_;
    static_assert(sizeof(data.state_) == sizeof(now.state));
    std::memcpy(now.state, data.state_.data(), sizeof(now.state));
    const auto next_float = own->next_float_normal_sample();
    const auto next_double = own->next_double_normal_sample();
    now.has_float = next_float.has_value();
    now.has_double = next_double.has_value();
    now.next_float = next_float.value_or(0.0f);
    now.next_double = next_double.value_or(0.0);
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
  long found = moved(now, seen.torch) ? 1 : 0;
  if (moved(*static_cast<const Words*>(numpy), seen.numpy)) found |= 2;
  if (moved(*static_cast<const Words*>(random), seen.random)) found |= 4;
  return PyLong_FromLong(found);
}

// Whether the list of a group's parameters is as long as it was and, from `at` on, has the objects that `all` has there.
bool same_params(PyObject* params, PyObject* size, PyObject* all, Py_ssize_t& at) {
  if (!PyList_CheckExact(params) || PyList_GET_SIZE(params) != PyLong_AsSsize_t(size)) return false;
  const Py_ssize_t count = PyList_GET_SIZE(params);
  if (all == Py_None || count == 0) return true;
  if (at + count > PyList_GET_SIZE(all)) return false;
  if (std::memcmp(&PyList_GET_ITEM(params, 0), &PyList_GET_ITEM(all, at), count * sizeof(PyObject*)) != 0) return false;
  at += count;
  return true;
}

// same_groups(groups, values, sizes, all) -> bool: whether an optimizer's groups, in order, hold these very values, have so
// many parameters and, unless `all` is None, are of these parameters. None: they are of types that Python must look at.
PyObject* same_groups(PyObject*, PyObject* const* args, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < 3; i++) {
    if (count != 4 || !PyList_CheckExact(args[i])) Py_RETURN_NONE;
  }
  PyObject *groups = args[0], *values = args[1], *sizes = args[2], *all = args[3];
  if (all != Py_None && !PyList_CheckExact(all)) Py_RETURN_NONE;
  if (PyList_GET_SIZE(groups) != PyList_GET_SIZE(sizes)) Py_RETURN_FALSE;
  static PyObject* const name = PyUnicode_InternFromString("params");
  if (name == nullptr) return nullptr;
  Py_ssize_t at = 0, param = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups); i++) {
    PyObject* group = PyList_GET_ITEM(groups, i);
    if (!PyDict_CheckExact(group)) Py_RETURN_NONE;
    PyObject *key = nullptr, *value = nullptr, *params = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(group, &position, &key, &value); at++) {
      if (at >= PyList_GET_SIZE(values) || PyList_GET_ITEM(values, at) != value) Py_RETURN_FALSE;
      if (key == name) params = value;
    }
    if (params == nullptr) Py_RETURN_NONE;
    if (!same_params(params, PyList_GET_ITEM(sizes, i), all, param)) Py_RETURN_FALSE;
  }
  if (at != PyList_GET_SIZE(values)) Py_RETURN_FALSE;
  if (all != Py_None && param != PyList_GET_SIZE(all)) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
}

template <typename F>
PyCFunction fast(F function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"look", look, METH_O, nullptr},
    {"generators", fast(generators), METH_FASTCALL, nullptr},
    {"same_groups", fast(same_groups), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_native() {
  PyObject* made = PyModule_Create(&definition);
  if (made != nullptr && PyModule_AddIntConstant(made, "GENERATORS_BYTES", sizeof(Generators)) != 0) {
    Py_DECREF(made);
    return nullptr;
  }
  return made;
}
