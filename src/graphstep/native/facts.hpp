// Facts: what must be as it was for a replay to be right. And small things that all of it uses.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>


namespace {

// ----- small things

enum Name {
  LATEST, CURRENT, MANUAL_HOOK, FORWARD_POSITION, BACKWARD_POSITION, NUM_IN_FLIGHT, NUM_REPLAYS, NUM_LAUNCHES, OWNER,
  NOTE_LAUNCH, MAIN_GRAD, SHOWN, HAS_RUN, IS_CLOSED, AHEAD, READ, VERSIONS, BEFORE_BACKWARD, LAUNCH_ALL, CLOSE,
  REPLAYED_BACKWARD, FORWARD, UNDO_AHEAD, AHEAD_OF_CALLS, SETTLE_AHEAD, NUM_NAMES
};
const char* const name_texts[] = {
    "latest", "current", "manual_hook", "forward_position", "backward_position", "num_in_flight", "num_replays",
    "num_launches", "owner", "_note_launch", "main_grad", "shown", "_has_run", "is_closed", "ahead", "_read",
    "_versions", "_before_backward", "_launch_all", "close", "replayed_backward", "forward", "undo_ahead",
    "_ahead", "settle_ahead"};
static_assert(sizeof(name_texts) / sizeof(name_texts[0]) == NUM_NAMES);
PyObject* names[NUM_NAMES];  // Interned names of attributes, in the order of the enumeration.
PyObject* one;

bool keep(PyObject* kept, PyObject* object) { return PyList_Append(kept, object) == 0; }

at::TensorImpl* impl_of(PyObject* tensor) { return THPVariable_Unpack(tensor).unsafeGetTensorImpl(); }

// -1 for tensors of inference mode, which count no writes.
int64_t version_of(PyObject* tensor) {
  at::TensorImpl* impl = impl_of(tensor);
  return impl->is_inference() ? -1 : static_cast<int64_t>(impl->version_counter().current_version());
}

const void* address_of(PyObject* tensor) {
  const at::Tensor& value = THPVariable_Unpack(tensor);
  return value.has_storage() ? value.const_data_ptr() : nullptr;
}

bool is_filled(PyObject* hooks) { return hooks != nullptr && hooks != Py_None && PyObject_IsTrue(hooks) != 0; }

bool has_hooks(PyObject* tensor) { return is_filled(reinterpret_cast<THPVariable*>(tensor)->backward_hooks); }

bool has_post_hooks(PyObject* tensor) {
  return is_filled(reinterpret_cast<THPVariable*>(tensor)->post_accumulate_grad_hooks);
}

// object.name += 1
bool count_up(PyObject* object, Name name) {
  PyObject* before = PyObject_GetAttr(object, names[name]);
  if (before == nullptr) return false;
  PyObject* after = PyNumber_Add(before, one);
  Py_DECREF(before);
  if (after == nullptr) return false;
  int failed = PyObject_SetAttr(object, names[name], after);
  Py_DECREF(after);
  return failed == 0;
}

// del object.name[0]
bool forget_first(PyObject* object, Name name) {
  PyObject* list = PyObject_GetAttr(object, names[name]);
  if (list == nullptr) return false;
  int failed = PySequence_DelItem(list, 0);
  Py_DECREF(list);
  return failed == 0;
}

// True if object.name is this value; never an error.
bool attribute_is(PyObject* object, Name name, PyObject* value) {
  PyObject* found = PyObject_GetAttr(object, names[name]);
  if (found == nullptr) {
    PyErr_Clear();
    return false;
  }
  Py_DECREF(found);
  return found == value;
}

bool same_elements(PyObject* sequence, PyObject* expected) {
  Py_ssize_t size = PyTuple_GET_SIZE(expected);
  if (PyList_CheckExact(sequence) || PyTuple_CheckExact(sequence)) {
    if (PySequence_Fast_GET_SIZE(sequence) != size) return false;
    for (Py_ssize_t i = 0; i < size; ++i)
      if (PySequence_Fast_GET_ITEM(sequence, i) != PyTuple_GET_ITEM(expected, i)) return false;
    return true;
  }
  PyObject* iterator = PyObject_GetIter(sequence);
  bool same = iterator != nullptr;
  Py_ssize_t at = 0;
  while (same) {
    PyObject* item = PyIter_Next(iterator);
    if (item == nullptr) break;
    same = at < size && item == PyTuple_GET_ITEM(expected, at);
    ++at;
    Py_DECREF(item);
  }
  Py_XDECREF(iterator);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return same && at == size;
}

// ----- Facts

struct Entry {
  PyObject* owner;
  PyObject* key;
  PyObject* value;
};
struct Whole {
  PyObject* owner;
  PyObject* values;
};
struct Size {
  PyObject* owner;
  Py_ssize_t size;
};
struct TensorFact {
  PyObject* tensor;
  const void* address;
  int requires_grad;  // -1: does not matter
  bool has_no_hooks;
  bool has_layout;
  std::vector<int64_t> layout;  // sizes, then strides
};
struct Answer {
  PyObject* function;
  PyObject* arguments;
  PyObject* expected;
};
struct Modes {
  bool is_known = false;
  bool grad = false, inference = false, autocast = false, cache = false;
  at::ScalarType dtype = at::ScalarType::Undefined;
  at::DeviceType device = at::DeviceType::CPU;
};

struct FactList {
  std::vector<Entry> entries, slots;
  std::vector<Whole> wholes, sequences;
  std::vector<Size> sizes;
  std::vector<TensorFact> tensors;
  std::vector<Answer> answers;
  Modes modes;

  bool hold() const {
    if (modes.is_known && !modes_hold()) return false;
    for (const Size& each : sizes) {
      Py_ssize_t now = PyDict_CheckExact(each.owner) ? PyDict_GET_SIZE(each.owner) : PyObject_Size(each.owner);
      if (now != each.size) return failed();
    }
    for (const Entry& each : entries)
      if (PyDict_GetItemWithError(each.owner, each.key) != each.value) return failed();
    for (const Whole& each : wholes) {
      Py_ssize_t position = 0, at = 0, size = PyTuple_GET_SIZE(each.values);
      PyObject *key, *value;
      if (PyDict_GET_SIZE(each.owner) != size) return false;
      while (PyDict_Next(each.owner, &position, &key, &value))
        if (at >= size || value != PyTuple_GET_ITEM(each.values, at++)) return false;
    }
    for (const TensorFact& each : tensors)
      if (!holds(each)) return false;
    for (const Whole& each : sequences)
      if (!same_elements(each.owner, each.values)) return false;
    for (const Entry& each : slots) {
      PyObject* found = PyObject_GetAttr(each.owner, each.key);
      if (found == nullptr) return failed();
      Py_DECREF(found);
      if (found != each.value) return false;
    }
    for (const Answer& each : answers) {
      PyObject* now = PyObject_CallObject(each.function, each.arguments);
      if (now == nullptr) return failed();
      int same = now == each.expected ? 1 : PyObject_RichCompareBool(now, each.expected, Py_EQ);
      Py_DECREF(now);
      if (same != 1) return failed();
    }
    return true;
  }

 private:
  static bool failed() {
    PyErr_Clear();
    return false;
  }

  bool modes_hold() const {
    return at::GradMode::is_enabled() == modes.grad && c10::InferenceMode::is_enabled() == modes.inference &&
        at::autocast::is_autocast_enabled(modes.device) == modes.autocast &&
        at::autocast::get_autocast_dtype(modes.device) == modes.dtype &&
        at::autocast::is_autocast_cache_enabled() == modes.cache;
  }

  static bool holds(const TensorFact& each) {
    const at::Tensor& value = THPVariable_Unpack(each.tensor);
    if (address_of(each.tensor) != each.address) return false;
    if (each.requires_grad >= 0 && value.requires_grad() != (each.requires_grad == 1)) return false;
    if (each.has_no_hooks && has_hooks(each.tensor)) return false;
    if (!each.has_layout) return true;
    size_t dimensions = static_cast<size_t>(value.dim());
    if (each.layout.size() != 2 * dimensions) return false;
    for (size_t i = 0; i < dimensions; ++i)
      if (value.sizes()[i] != each.layout[i] || value.strides()[i] != each.layout[dimensions + i]) return false;
    return true;
  }
};

// All objects of this file: a Python object, what it keeps, and a C++ value.
template <class T>
struct Boxed {
  PyObject_HEAD
  PyObject* kept;
  T value;
};

template <class T>
PyObject* boxed_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Boxed<T>*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  new (&self->value) T();
  self->kept = PyList_New(0);
  if (self->kept == nullptr) {
    Py_DECREF(self);
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(self);
}

template <class T>
int boxed_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(reinterpret_cast<Boxed<T>*>(object)->kept);
  return 0;
}

template <class T>
int boxed_clear(PyObject* object) {
  auto* self = reinterpret_cast<Boxed<T>*>(object);
  self->value = T();  // Borrowed pointers go first.
  Py_CLEAR(self->kept);
  return 0;
}

template <class T>
void boxed_free(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  boxed_clear<T>(object);
  reinterpret_cast<Boxed<T>*>(object)->value.~T();
  type->tp_free(object);
  Py_DECREF(type);
}

using Facts = Boxed<FactList>;
PyTypeObject *facts_type, *relay_type, *call_type, *passage_type;

bool is_open(PyObject* kept) {
  if (kept == nullptr) PyErr_SetString(PyExc_RuntimeError, "the object was taken apart by the garbage collector");
  return kept != nullptr;
}

bool is_dict(PyObject* object) {
  if (!PyDict_Check(object)) PyErr_SetString(PyExc_TypeError, "a dict is expected");
  return PyDict_Check(object);
}

bool is_tensor(PyObject* object) {
  bool found = THPVariable_Check(object);
  if (!found) PyErr_SetString(PyExc_TypeError, "a tensor is expected");
  return found;
}

// A method whose C++ errors become Python's.
template <PyCFunction method>
PyObject* guarded(PyObject* self, PyObject* arguments) {
  try {
    return method(self, arguments);
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* facts_entry(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Facts*>(object);
  PyObject *owner, *key, *value;
  if (!PyArg_ParseTuple(arguments, "OOO", &owner, &key, &value)) return nullptr;
  if (!is_dict(owner) || !is_open(self->kept) || !keep(self->kept, arguments)) return nullptr;
  self->value.entries.push_back({owner, key, value});
  Py_RETURN_NONE;
}

PyObject* facts_slot(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Facts*>(object);
  PyObject *owner, *key, *value;
  if (!PyArg_ParseTuple(arguments, "OOO", &owner, &key, &value)) return nullptr;
  if (!is_open(self->kept) || !keep(self->kept, arguments)) return nullptr;
  self->value.slots.push_back({owner, key, value});
  Py_RETURN_NONE;
}

PyObject* facts_whole(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Facts*>(object);
  PyObject *owner, *values;
  if (!PyArg_ParseTuple(arguments, "OO!", &owner, &PyTuple_Type, &values)) return nullptr;
  if (!is_dict(owner) || !is_open(self->kept) || !keep(self->kept, arguments)) return nullptr;
  self->value.wholes.push_back({owner, values});
  Py_RETURN_NONE;
}

PyObject* facts_elements(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Facts*>(object);
  PyObject *owner, *values;
  if (!PyArg_ParseTuple(arguments, "OO!", &owner, &PyTuple_Type, &values)) return nullptr;
  if (!is_open(self->kept) || !keep(self->kept, arguments)) return nullptr;
  self->value.sequences.push_back({owner, values});
  Py_RETURN_NONE;
}

PyObject* facts_size(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Facts*>(object);
  PyObject* owner;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(arguments, "On", &owner, &size)) return nullptr;
  if (!is_open(self->kept) || !keep(self->kept, arguments)) return nullptr;
  self->value.sizes.push_back({owner, size});
  Py_RETURN_NONE;
}

PyObject* facts_tensor(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Facts*>(object);
  PyObject* tensor;
  Py_ssize_t address;
  int requires_grad, has_no_hooks, has_layout;
  if (!PyArg_ParseTuple(arguments, "Onipp", &tensor, &address, &requires_grad, &has_no_hooks, &has_layout))
    return nullptr;
  if (!is_tensor(tensor) || !is_open(self->kept) || !keep(self->kept, arguments)) return nullptr;
  TensorFact fact{tensor, reinterpret_cast<const void*>(address), requires_grad, has_no_hooks != 0, has_layout != 0, {}};
  if (fact.has_layout) {
    const at::Tensor& value = THPVariable_Unpack(tensor);
    fact.layout.insert(fact.layout.end(), value.sizes().begin(), value.sizes().end());
    fact.layout.insert(fact.layout.end(), value.strides().begin(), value.strides().end());
  }
  self->value.tensors.push_back(std::move(fact));
  Py_RETURN_NONE;
}

PyObject* facts_answer(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Facts*>(object);
  PyObject *function, *given, *expected;
  if (!PyArg_ParseTuple(arguments, "OO!O", &function, &PyTuple_Type, &given, &expected)) return nullptr;
  if (!is_open(self->kept) || !keep(self->kept, arguments)) return nullptr;
  self->value.answers.push_back({function, given, expected});
  Py_RETURN_NONE;
}

// modes(tensor, grad, inference, autocast, dtype, cache): modes of the thread; autocast for the device of the tensor.
PyObject* facts_modes(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Facts*>(object);
  PyObject *tensor, *dtype;
  int grad, inference, autocast, cache;
  if (!PyArg_ParseTuple(arguments, "OpppOp", &tensor, &grad, &inference, &autocast, &dtype, &cache)) return nullptr;
  if (!is_tensor(tensor)) return nullptr;
  if (!THPDtype_Check(dtype)) {
    PyErr_SetString(PyExc_TypeError, "a dtype is expected");
    return nullptr;
  }
  Modes& modes = self->value.modes;
  modes.device = THPVariable_Unpack(tensor).device().type();
  modes.grad = grad != 0;
  modes.inference = inference != 0;
  modes.autocast = autocast != 0;
  modes.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  modes.cache = cache != 0;
  modes.is_known = true;
  Py_RETURN_NONE;
}

PyObject* facts_hold(PyObject* object, PyObject*) {
  return PyBool_FromLong(reinterpret_cast<Facts*>(object)->value.hold());
}

PyMethodDef facts_methods[] = {
    {"entry", guarded<facts_entry>, METH_VARARGS, "entry(dict, key, value): the dict has this object there."},
    {"slot", guarded<facts_slot>, METH_VARARGS, "slot(object, name, value): the attribute is this object."},
    {"whole", guarded<facts_whole>, METH_VARARGS, "whole(dict, values): the dict has these objects, in this order."},
    {"elements", guarded<facts_elements>, METH_VARARGS, "elements(sequence, values): it has these objects, in this order."},
    {"size", guarded<facts_size>, METH_VARARGS, "size(container, number): it has so many entries."},
    {"tensor", guarded<facts_tensor>, METH_VARARGS,
     "tensor(tensor, address, requires_grad or -1, has_no_hooks, has_layout): it is there, and as it is now."},
    {"answer", guarded<facts_answer>, METH_VARARGS, "answer(function, arguments, expected): the function returns an equal."},
    {"modes", guarded<facts_modes>, METH_VARARGS, "modes(tensor, grad, inference, autocast, dtype, cache): modes of the thread."},
    {"hold", guarded<facts_hold>, METH_NOARGS, "hold() -> bool: True if surely all of it is so."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace
