// The common case of a replay, without Python: is everything as it was at the capture, and if so, launch.
//
// Every answer is "surely as it was" or "look closer"; who gets the second one looks closer in Python, and finds out
// there what has changed and what that means. So nothing is decided here that Python would decide in another way.
//
// Types: Facts (what must be as it was), Relay (the steps of a chain of captured layers), Call (stands where a layer is
// called, and knows the passage that expects it), Passage (one forward pass through a relay, under way).
//
// Each object keeps whatever it refers to in one Python list, `kept`; all other pointers are borrowed from there.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

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

PyObject* names[11];  // Interned names of attributes, in the order of the enumeration.
enum Name {
  LATEST, CURRENT, MANUAL_HOOK, FORWARD_POSITION, BACKWARD_POSITION, NUM_IN_FLIGHT, NUM_REPLAYS, NUM_LAUNCHES, OWNER,
  NOTE_LAUNCH, MAIN_GRAD
};
const char* const name_texts[] = {
    "latest", "current", "manual_hook", "forward_position", "backward_position", "num_in_flight", "num_replays",
    "num_launches", "owner", "_note_launch", "main_grad"};
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
  if (!THPVariable_Check(object)) PyErr_SetString(PyExc_TypeError, "a tensor is expected");
  return THPVariable_Check(object);
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
    {"entry", facts_entry, METH_VARARGS, "entry(dict, key, value): the dict has this object there."},
    {"slot", facts_slot, METH_VARARGS, "slot(object, name, value): the attribute is this object."},
    {"whole", facts_whole, METH_VARARGS, "whole(dict, values): the dict has these objects, in this order."},
    {"elements", facts_elements, METH_VARARGS, "elements(sequence, values): it has these objects, in this order."},
    {"size", facts_size, METH_VARARGS, "size(container, number): it has so many entries."},
    {"tensor", facts_tensor, METH_VARARGS,
     "tensor(tensor, address, requires_grad or -1, has_no_hooks, has_layout): it is there, and as it is now."},
    {"answer", facts_answer, METH_VARARGS, "answer(function, arguments, expected): the function returns an equal."},
    {"modes", facts_modes, METH_VARARGS, "modes(tensor, grad, inference, autocast, dtype, cache): modes of the thread."},
    {"hold", facts_hold, METH_NOARGS, "hold() -> bool: True if surely all of it is so."},
    {nullptr, nullptr, 0, nullptr}};

// ----- Relay

struct Step {
  FactList* facts = nullptr;
  PyObject* calls = nullptr;    // where the layer is called: has `current` and `manual_hook`
  PyObject* call = nullptr;     // a Call
  PyObject* pair = nullptr;
  PyObject* owner = nullptr;    // of the pair: what `calls.current` has to be
  PyObject* stats = nullptr;
  PyObject* launch = nullptr;   // None: launched with the step before
  PyObject* relaunch = nullptr; // of the backward half; None: launched with the step after
  PyObject* forward_position = nullptr;
  PyObject* backward_position = nullptr;
  bool is_tuple = false;        // the result: one tensor, or a tuple of them
  bool notes_launch = false;
  std::vector<PyObject*> outputs, reads, trained, accumulated;
  std::vector<bool> has_gradient;  // for each output, whether the backward half takes one
};
struct Home {
  PyObject* leaf;
  PyObject* shown;
  const void* address;
  bool is_main;
};
struct Handed {
  PyObject* place;  // position or name of an argument
  Py_ssize_t position;  // -1 for a name
  Py_ssize_t output;
};
struct StepList {
  PyObject* lane = nullptr;
  std::vector<Step> steps;
  std::vector<Handed> handed;
  std::vector<Home> homes;
};
using Relay = Boxed<StepList>;

struct Expected {
  PyObject* place;
  Py_ssize_t position;
  PyObject* tensor;  // alive as long as its weak reference has not been called back
  int64_t version;
};
struct Other {
  PyObject* name;  // nullptr: by position
  Py_ssize_t position;
  PyObject* value;
  int64_t version;  // -2: no tensor
};
struct Way {
  Relay* relay = nullptr;
  PyObject* run = nullptr;
  PyObject* span = nullptr;
  PyObject* versions = nullptr;  // run._versions
  PyObject* handles = nullptr;
  PyObject* arguments = nullptr;
  PyObject* named = nullptr;
  PyObject* ambient = nullptr;
  PyObject* watchers = nullptr;  // weak references to what was handed out last
  size_t first = 0, next = 0;
  bool is_running = false;  // Python may run meanwhile, and end the passage
  bool is_doomed = false;   // it did: the end comes when the step is over
  Py_ssize_t num_positional = 0, num_named = 0;
  std::vector<Expected> expected;
  std::vector<Other> others;
  std::vector<std::vector<int64_t>> read_versions;  // of each step that was launched with one before
};
using Passage = Boxed<Way>;

struct CallValue {
  PyObject* fallback = nullptr;
  PyObject* calls = nullptr;
  PyObject* resume = nullptr;  // called with the state of a passage that Python has to look at
  Passage* passage = nullptr;  // kept by its own reference
  bool takes_first = false;    // gives the one tensor of a tuple
};
struct Call {
  PyObject_HEAD
  PyObject* kept;
  CallValue value;
  vectorcallfunc vectorcall;
};

bool tensors_into(std::vector<PyObject*>& found, PyObject* list) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(list); ++i) {
    if (!is_tensor(PyTuple_GET_ITEM(list, i))) return false;
    found.push_back(PyTuple_GET_ITEM(list, i));
  }
  return true;
}

// step(facts, calls, call, pair, stats, launch, relaunch, (forward position, backward position), is_tuple, notes_launch,
//      outputs, reads, trained, accumulated, has_gradient)
PyObject* relay_step(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Relay*>(object);
  Step step;
  PyObject *facts, *positions, *outputs, *reads, *trained, *accumulated, *has_gradient;
  int is_tuple, notes_launch;
  if (!PyArg_ParseTuple(
          arguments, "O!OO!OOOOO!ppO!O!O!O!O!", facts_type, &facts, &step.calls, call_type, &step.call, &step.pair,
          &step.stats, &step.launch, &step.relaunch, &PyTuple_Type, &positions, &is_tuple, &notes_launch, &PyTuple_Type,
          &outputs, &PyTuple_Type, &reads, &PyTuple_Type, &trained, &PyTuple_Type, &accumulated, &PyTuple_Type,
          &has_gradient))
    return nullptr;
  if (!PyArg_ParseTuple(positions, "OO", &step.forward_position, &step.backward_position)) return nullptr;
  step.facts = &reinterpret_cast<Facts*>(facts)->value;
  step.is_tuple = is_tuple != 0;
  step.notes_launch = notes_launch != 0;
  if (!tensors_into(step.outputs, outputs) || !tensors_into(step.reads, reads) ||
      !tensors_into(step.trained, trained) || !tensors_into(step.accumulated, accumulated))
    return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(has_gradient); ++i)
    step.has_gradient.push_back(PyTuple_GET_ITEM(has_gradient, i) == Py_True);
  if (step.has_gradient.size() != step.outputs.size()) {
    PyErr_SetString(PyExc_ValueError, "has_gradient has one entry for each output");
    return nullptr;
  }
  step.owner = PyObject_GetAttr(step.pair, names[OWNER]);
  if (step.owner == nullptr) return nullptr;
  bool is_kept = is_open(self->kept) && keep(self->kept, arguments) && keep(self->kept, step.owner);
  Py_DECREF(step.owner);
  if (!is_kept) return nullptr;
  self->value.steps.push_back(std::move(step));
  Py_RETURN_NONE;
}

// home(leaf, shown, address, is_main)
PyObject* relay_home(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Relay*>(object);
  PyObject *leaf, *shown;
  Py_ssize_t address;
  int is_main;
  if (!PyArg_ParseTuple(arguments, "OOnp", &leaf, &shown, &address, &is_main)) return nullptr;
  if (!is_tensor(leaf) || !is_tensor(shown) || !is_open(self->kept) || !keep(self->kept, arguments)) return nullptr;
  self->value.homes.push_back({leaf, shown, reinterpret_cast<const void*>(address), is_main != 0});
  Py_RETURN_NONE;
}

// handover(place, output)
PyObject* relay_handover(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Relay*>(object);
  PyObject* place;
  Py_ssize_t output;
  if (!PyArg_ParseTuple(arguments, "On", &place, &output)) return nullptr;
  if (!is_open(self->kept) || !keep(self->kept, arguments)) return nullptr;
  Py_ssize_t position = PyLong_Check(place) ? PyLong_AsSsize_t(place) : -1;
  self->value.handed.push_back({place, position, output});
  Py_RETURN_NONE;
}

int relay_init(PyObject* object, PyObject* arguments, PyObject*) {
  auto* self = reinterpret_cast<Relay*>(object);
  PyObject* lane;
  if (!PyArg_ParseTuple(arguments, "O", &lane)) return -1;
  if (!is_open(self->kept) || !keep(self->kept, arguments)) return -1;
  self->value.lane = lane;
  return 0;
}

bool home_holds(const Home& home) {
  if (address_of(home.shown) != home.address) return false;
  if (home.is_main) return attribute_is(home.leaf, MAIN_GRAD, home.shown);
  PyObject* attributes = PyObject_GenericGetDict(home.leaf, nullptr);
  if (attributes == nullptr) {
    PyErr_Clear();
    return false;
  }
  int has_main = PyDict_Contains(attributes, names[MAIN_GRAD]);
  Py_DECREF(attributes);
  if (has_main != 0) {
    PyErr_Clear();
    return false;
  }
  return THPVariable_Unpack(home.leaf).grad().unsafeGetTensorImpl() == impl_of(home.shown);
}

// holds_backward(versions, gradients): True if surely all backward halves may be launched, one after the other, for
// gradients of the last step's results alone.
PyObject* relay_holds_backward(PyObject* object, PyObject* arguments) {
  auto& value = reinterpret_cast<Relay*>(object)->value;
  PyObject *versions, *gradients;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &versions, &PyTuple_Type, &gradients)) return nullptr;
  if (PyList_GET_SIZE(versions) != static_cast<Py_ssize_t>(value.steps.size())) Py_RETURN_FALSE;
  Py_ssize_t at = 0;
  for (size_t i = 0; i < value.steps.size(); ++i) {
    const Step& step = value.steps[i];
    PyObject* noted = PyList_GET_ITEM(versions, static_cast<Py_ssize_t>(i));
    bool is_last = i + 1 == value.steps.size();
    if (!PyList_Check(noted) || PyList_GET_SIZE(noted) != static_cast<Py_ssize_t>(step.outputs.size())) Py_RETURN_FALSE;
    for (size_t k = 0; k < step.outputs.size(); ++k, ++at) {
      if (at >= PyTuple_GET_SIZE(gradients)) Py_RETURN_FALSE;
      bool is_given = PyTuple_GET_ITEM(gradients, at) != Py_None;
      if (is_given != (is_last && step.has_gradient[k])) Py_RETURN_FALSE;
      if (PyLong_AsLongLong(PyList_GET_ITEM(noted, static_cast<Py_ssize_t>(k))) != version_of(step.outputs[k]))
        Py_RETURN_FALSE;
    }
    for (PyObject* each : step.trained)
      if (!THPVariable_Unpack(each).requires_grad()) Py_RETURN_FALSE;
    for (PyObject* each : step.accumulated)
      if (has_hooks(each) || has_post_hooks(each)) Py_RETURN_FALSE;
  }
  if (at != PyTuple_GET_SIZE(gradients)) Py_RETURN_FALSE;
  for (const Home& home : value.homes)
    if (!home_holds(home)) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
}

// landmarks(first): of each step from there on, a parameter whose gradient its backward half accumulates, without hooks
// that autograd would run.
PyObject* relay_landmarks(PyObject* object, PyObject* first) {
  auto& value = reinterpret_cast<Relay*>(object)->value;
  Py_ssize_t start = PyLong_AsSsize_t(first);
  if (start == -1 && PyErr_Occurred()) return nullptr;
  PyObject* found = PyList_New(0);
  for (size_t i = static_cast<size_t>(start); found != nullptr && i < value.steps.size(); ++i) {
    const auto& accumulated = value.steps[i].accumulated;
    if (!accumulated.empty() && !has_post_hooks(accumulated[0]) && PyList_Append(found, accumulated[0]) != 0)
      Py_CLEAR(found);
  }
  return found;
}

// results(first): tensors over the outputs of each step from there on, without a history.
PyObject* relay_results(PyObject* object, PyObject* first) {
  auto& value = reinterpret_cast<Relay*>(object)->value;
  Py_ssize_t start = PyLong_AsSsize_t(first);
  if (start == -1 && PyErr_Occurred()) return nullptr;
  size_t size = 0;
  for (size_t i = static_cast<size_t>(start); i < value.steps.size(); ++i) size += value.steps[i].outputs.size();
  PyObject* found = PyTuple_New(static_cast<Py_ssize_t>(size));
  Py_ssize_t at = 0;
  try {
    for (size_t i = static_cast<size_t>(start); found != nullptr && i < value.steps.size(); ++i) {
      for (PyObject* output : value.steps[i].outputs) {
        PyObject* made = THPVariable_Wrap(THPVariable_Unpack(output).detach());
        if (made == nullptr) {
          Py_CLEAR(found);
          break;
        }
        PyTuple_SET_ITEM(found, at++, made);
      }
    }
  } catch (const std::exception& error) {
    Py_CLEAR(found);
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return found;
}

bool launch(PyObject* function, PyObject* stats) {
  PyObject* nothing = PyObject_CallNoArgs(function);
  if (nothing == nullptr) return false;
  Py_DECREF(nothing);
  return count_up(stats, NUM_LAUNCHES);
}

PyObject* relay_launch_backward(PyObject* object, PyObject*) {
  auto& value = reinterpret_cast<Relay*>(object)->value;
  for (size_t i = value.steps.size(); i-- > 0;) {
    const Step& step = value.steps[i];
    if (step.relaunch != Py_None && !launch(step.relaunch, step.stats)) return nullptr;
  }
  Py_RETURN_NONE;
}

// ----- Passage

void let_go(Call* call) {
  Passage* passage = std::exchange(call->value.passage, nullptr);
  Py_XDECREF(passage);
}

// A passage that expects nothing any more.
void end(Passage* self) {
  Way& way = self->value;
  if (way.relay == nullptr) return;
  if (way.is_running) {
    way.is_doomed = true;
    return;
  }
  Py_INCREF(self);
  auto* call = reinterpret_cast<Call*>(way.relay->value.steps[way.next].call);
  PyObject* kept = std::exchange(self->kept, PyList_New(0));
  PyObject* watchers = std::exchange(way.watchers, nullptr);
  PyObject* handles = way.handles;
  way = Way();
  if (call->value.passage == self) let_go(call);
  if (PyList_Check(handles)) PyList_SetSlice(handles, 0, PyList_GET_SIZE(handles), nullptr);
  Py_XDECREF(watchers);
  Py_XDECREF(kept);
  Py_DECREF(self);
}

// What was handed out is gone: nobody can call the next layer with it.
PyObject* passage_gone(PyObject* object, PyObject*) {
  end(reinterpret_cast<Passage*>(object));
  Py_RETURN_NONE;
}

PyMethodDef gone_method = {"gone", passage_gone, METH_O, nullptr};

// Wait for the step `next`, whose arguments are among the results of the one before.
bool arm(Passage* self) {
  Way& way = self->value;
  const StepList& relay = way.relay->value;
  PyObject* results = PyList_GetItem(way.handles, static_cast<Py_ssize_t>(way.next - way.first - 1));
  if (results == nullptr) return false;
  way.expected.clear();
  PyObject* watchers = PyList_New(0);
  PyObject* gone = watchers == nullptr ? nullptr : PyCFunction_New(&gone_method, reinterpret_cast<PyObject*>(self));
  bool is_well = gone != nullptr;
  for (size_t i = 0; is_well && i < relay.handed.size(); ++i) {
    const Handed& each = relay.handed[i];
    PyObject* tensor = PyList_GetItem(results, each.output);
    PyObject* reference = tensor == nullptr ? nullptr : PyWeakref_NewRef(tensor, gone);
    is_well = reference != nullptr && PyList_Append(watchers, reference) == 0;
    Py_XDECREF(reference);
    if (is_well) way.expected.push_back({each.place, each.position, tensor, version_of(tensor)});
  }
  Py_XDECREF(gone);
  PyObject* empty = is_well ? PyList_New(0) : nullptr;
  is_well = empty != nullptr;
  PyObject* before = std::exchange(way.watchers, watchers);
  Py_XDECREF(before);
  if (!is_well) return false;
  // From here on only the caller keeps them.
  if (PyList_SetItem(way.handles, static_cast<Py_ssize_t>(way.next - way.first - 1), empty) != 0) return false;
  auto* call = reinterpret_cast<Call*>(relay.steps[way.next].call);
  if (call->value.passage != nullptr) end(call->value.passage);
  let_go(call);
  Py_INCREF(self);
  call->value.passage = self;
  return true;
}

// The versions of what the steps read that are launched with this one.
void note_reads(Way& way, size_t launched) {
  const auto& steps = way.relay->value.steps;
  for (size_t i = launched + 1; i < steps.size() && steps[i].launch == Py_None; ++i) {
    auto& versions = way.read_versions[i];
    versions.clear();
    for (PyObject* each : steps[i].reads) versions.push_back(version_of(each));
  }
}

bool matches(Passage* self, PyObject* const* arguments, Py_ssize_t num_positional, PyObject* keywords) {
  const Way& way = self->value;
  const Step& step = way.relay->value.steps[way.next];
  Py_ssize_t num_named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  if (num_positional != way.num_positional || num_named != way.num_named) return false;
  auto given = [&](PyObject* name, Py_ssize_t position) -> PyObject* {
    if (position >= 0) return position < num_positional ? arguments[position] : nullptr;
    for (Py_ssize_t i = 0; i < num_named; ++i) {
      PyObject* each = PyTuple_GET_ITEM(keywords, i);
      if (each == name || PyUnicode_Compare(each, name) == 0) return arguments[num_positional + i];
    }
    return nullptr;
  };
  for (const Expected& each : way.expected) {
    if (given(each.place, each.position) != each.tensor || version_of(each.tensor) != each.version) return false;
    if (has_hooks(each.tensor) || THPVariable_Unpack(each.tensor).retains_grad()) return false;
  }
  for (const Other& each : way.others) {
    if (given(each.name, each.position) != each.value) return false;
    if (each.version != -2 && version_of(each.value) != each.version) return false;
  }
  if (!attribute_is(way.relay->value.lane, LATEST, way.span) || !attribute_is(step.calls, CURRENT, step.owner))
    return false;
  if (step.launch == Py_None) {
    const auto& versions = way.read_versions[way.next];
    for (size_t i = 0; i < step.reads.size(); ++i)
      if (version_of(step.reads[i]) != versions[i]) return false;
  }
  for (PyObject* each : step.accumulated)
    if (has_hooks(each)) return false;
  return step.facts->hold();
}

// Run the expected step; a new reference to its result.
PyObject* advance(Passage* self, bool takes_first) {
  Way& way = self->value;
  const Step& step = way.relay->value.steps[way.next];
  PyObject* hook = PyObject_GetAttr(step.calls, names[MANUAL_HOOK]);
  if (hook == nullptr) return nullptr;
  if (hook != Py_None) {
    PyObject* nothing = PyObject_CallNoArgs(hook);
    Py_DECREF(hook);
    if (nothing == nullptr) return nullptr;
    Py_DECREF(nothing);
  } else {
    Py_DECREF(hook);
  }
  if (step.launch != Py_None && !launch(step.launch, step.stats)) return nullptr;
  PyObject* versions = PyList_New(static_cast<Py_ssize_t>(step.outputs.size()));
  if (versions == nullptr) return nullptr;
  for (size_t i = 0; i < step.outputs.size(); ++i) {
    // Anything that autograd saved from the last replay's outputs is now stale; autograd checks versions.
    impl_of(step.outputs[i])->bump_version();
    PyList_SET_ITEM(versions, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(version_of(step.outputs[i])));
  }
  int failed = PyList_Append(way.versions, versions);
  Py_DECREF(versions);
  PyObject* index = PyLong_FromSize_t(way.next);
  if (failed != 0 || index == nullptr) return nullptr;
  bool is_well = true;
  if (step.launch != Py_None) {
    note_reads(way, way.next);
    if (step.notes_launch) {
      PyObject* nothing = PyObject_CallMethodOneArg(way.run, names[NOTE_LAUNCH], index);
      is_well = nothing != nullptr;
      Py_XDECREF(nothing);
    }
  }
  is_well = is_well && PyObject_SetAttr(way.run, names[LATEST], index) == 0 &&
      PyObject_SetAttr(way.span, names[FORWARD_POSITION], step.forward_position) == 0 &&
      PyObject_SetAttr(way.span, names[BACKWARD_POSITION], step.backward_position) == 0 &&
      count_up(step.pair, NUM_IN_FLIGHT) && count_up(step.pair, NUM_REPLAYS) && count_up(step.stats, NUM_REPLAYS);
  Py_DECREF(index);
  if (!is_well) return nullptr;
  PyObject* results = PyList_GetItem(way.handles, static_cast<Py_ssize_t>(way.next - way.first));
  if (results == nullptr) return nullptr;
  PyObject* result;
  if (!step.is_tuple || (takes_first && PyList_GET_SIZE(results) == 1)) {
    result = PyList_GetItem(results, 0);
    Py_XINCREF(result);
  } else {
    result = PyList_AsTuple(results);
  }
  if (result == nullptr) return nullptr;
  if (++way.next < way.relay->value.steps.size()) {
    if (!arm(self)) {
      Py_DECREF(result);
      return nullptr;
    }
  } else {
    --way.next;
    way.is_doomed = true;
  }
  return result;
}

// begin(run, span, versions, handles, arguments, named, ambient, first): expect the step after `first`, which has just
// run.
PyObject* relay_begin(PyObject* object, PyObject* arguments) {
  auto* relay = reinterpret_cast<Relay*>(object);
  auto* self = reinterpret_cast<Passage*>(boxed_new<Way>(passage_type, nullptr, nullptr));
  if (self == nullptr) return nullptr;
  Way& way = self->value;
  Py_ssize_t first;
  bool is_well = PyArg_ParseTuple(
                     arguments, "OOO!O!O!O!On", &way.run, &way.span, &PyList_Type, &way.versions, &PyList_Type,
                     &way.handles, &PyTuple_Type, &way.arguments, &PyDict_Type, &way.named, &way.ambient, &first) != 0;
  is_well = is_well && keep(self->kept, arguments) && keep(self->kept, object);
  if (is_well && (first < 0 || first + 1 >= static_cast<Py_ssize_t>(relay->value.steps.size()))) {
    PyErr_SetString(PyExc_IndexError, "there is no step after this one");
    is_well = false;
  }
  if (!is_well) {
    self->value = Way();
    Py_DECREF(self);
    return nullptr;
  }
  way.relay = relay;
  way.first = static_cast<size_t>(first);
  way.next = way.first + 1;
  way.num_positional = PyTuple_GET_SIZE(way.arguments);
  way.num_named = PyDict_GET_SIZE(way.named);
  way.read_versions.resize(relay->value.steps.size());
  size_t launched = way.first;
  while (launched > 0 && relay->value.steps[launched].launch == Py_None) --launched;
  note_reads(way, launched);
  auto is_handed = [&](PyObject* name, Py_ssize_t position) {
    for (const Handed& each : relay->value.handed)
      if (position >= 0 ? each.position == position : each.position < 0 && PyUnicode_Compare(each.place, name) == 0)
        return true;
    return false;
  };
  auto other = [&](PyObject* name, Py_ssize_t position, PyObject* value) {
    if (!is_handed(name, position))
      way.others.push_back({name, position, value, THPVariable_Check(value) ? version_of(value) : -2});
  };
  for (Py_ssize_t i = 0; i < way.num_positional; ++i) other(nullptr, i, PyTuple_GET_ITEM(way.arguments, i));
  Py_ssize_t at = 0;
  PyObject *key, *value;
  while (PyDict_Next(way.named, &at, &key, &value)) other(key, -1, value);
  is_well = arm(self);
  Py_DECREF(self);  // The call that is expected keeps it.
  if (!is_well) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef relay_methods[] = {
    {"step", relay_step, METH_VARARGS, "step(...): add the next step; see the source."},
    {"home", relay_home, METH_VARARGS, "home(leaf, shown, address, is_main): where a gradient lives."},
    {"handover", relay_handover, METH_VARARGS, "handover(place, output): an argument that is a result of the one before."},
    {"begin", relay_begin, METH_VARARGS, "begin(run, span, versions, handles, arguments, named, ambient, first)"},
    {"landmarks", relay_landmarks, METH_O, "landmarks(first): parameters whose gradients tell which pass it is."},
    {"results", relay_results, METH_O, "results(first): tensors over the outputs of all steps from there on."},
    {"holds_backward", relay_holds_backward, METH_VARARGS, "holds_backward(versions, gradients) -> bool"},
    {"launch_backward", relay_launch_backward, METH_NOARGS, "launch_backward(): launch all backward halves, last first."},
    {nullptr, nullptr, 0, nullptr}};

int passage_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Passage*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->kept);
  Py_VISIT(self->value.watchers);
  return 0;
}

int passage_clear(PyObject* object) {
  auto* self = reinterpret_cast<Passage*>(object);
  PyObject* watchers = self->value.watchers;
  self->value = Way();
  Py_XDECREF(watchers);
  Py_CLEAR(self->kept);
  return 0;
}

void passage_free(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  passage_clear(object);
  reinterpret_cast<Passage*>(object)->value.~Way();
  type->tp_free(object);
  Py_DECREF(type);
}

// ----- Call

// The state of a passage, for Python: (run, next step, handles, arguments, named, ambient, results handed out last with
// place and version, the other tensors with their versions).
PyObject* state_of(Passage* self) {
  Way& way = self->value;
  PyObject* expected = PyList_New(0);
  PyObject* others = PyList_New(0);
  bool is_well = expected != nullptr && others != nullptr;
  auto add = [&](PyObject* list, PyObject* item) {
    is_well = is_well && item != nullptr && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
  };
  for (const Expected& each : way.expected)
    if (is_well) add(expected, Py_BuildValue("(OOL)", each.place, each.tensor, static_cast<long long>(each.version)));
  for (const Other& each : way.others)
    if (is_well && each.version != -2)
      add(others, Py_BuildValue("(OL)", each.value, static_cast<long long>(each.version)));
  PyObject* found = nullptr;
  if (is_well)
    found = Py_BuildValue(
        "(OnOOOOOO)", way.run, static_cast<Py_ssize_t>(way.next), way.handles, way.arguments, way.named, way.ambient,
        expected, others);
  Py_XDECREF(expected);
  Py_XDECREF(others);
  return found;
}

// Have Python take over what is under way here.
bool hand_over(Call* self) {
  Passage* passage = self->value.passage;
  Py_INCREF(passage);
  PyObject* state = state_of(passage);
  if (state != nullptr) {
    // The list of handles goes on in Python: a copy, as the end of the passage empties it.
    PyObject* handles = PyTuple_GET_ITEM(state, 2);
    PyObject* copy = PyList_GetSlice(handles, 0, PyList_GET_SIZE(handles));
    if (copy == nullptr) {
      Py_CLEAR(state);
    } else {
      PyTuple_SET_ITEM(state, 2, copy);
      Py_DECREF(handles);
    }
  }
  if (state == nullptr) {
    Py_DECREF(passage);
    return false;
  }
  end(passage);
  Py_DECREF(passage);
  PyObject* nothing = PyObject_CallObject(self->value.resume, state);
  Py_DECREF(state);
  Py_XDECREF(nothing);
  return nothing != nullptr;
}

PyObject* call_vectorcall(PyObject* object, PyObject* const* arguments, size_t flags, PyObject* keywords) {
  auto* self = reinterpret_cast<Call*>(object);
  Passage* passage = self->value.passage;
  if (passage != nullptr) {
    PyObject* relay = reinterpret_cast<PyObject*>(passage->value.relay);
    Py_INCREF(relay);
    Py_INCREF(passage);
    Way& way = passage->value;
    way.is_running = true;
    bool is_match = matches(passage, arguments, PyVectorcall_NARGS(flags), keywords) && !way.is_doomed;
    PyErr_Clear();
    PyObject* result = nullptr;
    if (is_match) {
      if (self->value.passage == passage) let_go(self);
      result = advance(passage, self->value.takes_first);
    }
    way.is_running = false;
    bool is_over = way.is_doomed || (is_match && result == nullptr);
    bool is_well = true;
    if (is_over) {
      PyObject *kind, *error, *trace;
      PyErr_Fetch(&kind, &error, &trace);
      end(passage);
      PyErr_Restore(kind, error, trace);
    } else if (!is_match && self->value.passage == passage) {
      is_well = hand_over(self);
    }
    Py_DECREF(passage);
    Py_DECREF(relay);
    if (is_match || !is_well) return result;
  }
  if (!is_open(self->value.fallback)) return nullptr;
  return PyObject_Vectorcall(self->value.fallback, arguments, flags, keywords);
}

PyObject* call_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Call*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  new (&self->value) CallValue();
  self->kept = PyList_New(0);
  self->vectorcall = call_vectorcall;
  if (self->kept == nullptr) {
    Py_DECREF(self);
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(self);
}

// Call(fallback, resume, takes_first)
int call_init(PyObject* object, PyObject* arguments, PyObject*) {
  auto* self = reinterpret_cast<Call*>(object);
  int takes_first;
  if (!PyArg_ParseTuple(arguments, "OOp", &self->value.fallback, &self->value.resume, &takes_first)) return -1;
  self->value.takes_first = takes_first != 0;
  return keep(self->kept, arguments) ? 0 : -1;
}

// True if a passage expects this call.
PyObject* call_is_expected(PyObject* object, PyObject*) {
  return PyBool_FromLong(reinterpret_cast<Call*>(object)->value.passage != nullptr);
}

// Expect it no more, and let go of the results that were not asked for.
PyObject* call_drop(PyObject* object, PyObject*) {
  Passage* passage = reinterpret_cast<Call*>(object)->value.passage;
  if (passage != nullptr) end(passage);
  Py_RETURN_NONE;
}

PyMethodDef call_methods[] = {
    {"is_expected", call_is_expected, METH_NOARGS, "is_expected() -> bool: a passage waits for this call."},
    {"drop", call_drop, METH_NOARGS, "drop(): end the passage that waits for this call."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef call_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Call, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

int call_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Call*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->kept);
  Py_VISIT(self->value.passage);
  return 0;
}

int call_clear(PyObject* object) {
  auto* self = reinterpret_cast<Call*>(object);
  let_go(self);
  self->value = CallValue();
  Py_CLEAR(self->kept);
  return 0;
}

void call_free(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  Passage* passage = reinterpret_cast<Call*>(object)->value.passage;
  if (passage != nullptr) end(passage);
  call_clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// ----- module

template <class T>
PyTypeObject* make_type(const char* name, size_t size, PyMethodDef* methods, initproc init) {
  std::vector<PyType_Slot> slots = {
      {Py_tp_new, reinterpret_cast<void*>(boxed_new<T>)},
      {Py_tp_traverse, reinterpret_cast<void*>(boxed_traverse<T>)},
      {Py_tp_clear, reinterpret_cast<void*>(boxed_clear<T>)},
      {Py_tp_dealloc, reinterpret_cast<void*>(boxed_free<T>)},
      {Py_tp_methods, methods}};
  if (init != nullptr) slots.push_back({Py_tp_init, reinterpret_cast<void*>(init)});
  slots.push_back({0, nullptr});
  PyType_Spec spec = {name, static_cast<int>(size), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots.data()};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

PyMethodDef no_methods[] = {{nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "fast_path", "The common case of a replay, without Python.", -1, no_methods, nullptr, nullptr,
    nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fast_path() {
  for (size_t i = 0; i < sizeof(name_texts) / sizeof(name_texts[0]); ++i) {
    names[i] = PyUnicode_InternFromString(name_texts[i]);
    if (names[i] == nullptr) return nullptr;
  }
  one = PyLong_FromLong(1);
  facts_type = make_type<FactList>("fast_path.Facts", sizeof(Facts), facts_methods, nullptr);
  relay_type = make_type<StepList>("fast_path.Relay", sizeof(Relay), relay_methods, relay_init);
  PyType_Slot passage_slots[] = {
      {Py_tp_traverse, reinterpret_cast<void*>(passage_traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(passage_clear)},
      {Py_tp_dealloc, reinterpret_cast<void*>(passage_free)},
      {0, nullptr}};
  PyType_Spec passage_spec = {
      "fast_path.Passage", sizeof(Passage), 0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, passage_slots};
  passage_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&passage_spec));
  PyType_Slot call_slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(call_new)},
      {Py_tp_init, reinterpret_cast<void*>(call_init)},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_traverse, reinterpret_cast<void*>(call_traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(call_clear)},
      {Py_tp_dealloc, reinterpret_cast<void*>(call_free)},
      {Py_tp_methods, call_methods},
      {Py_tp_members, call_members},
      {0, nullptr}};
  PyType_Spec call_spec = {
      "fast_path.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
      call_slots};
  call_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&call_spec));
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr || one == nullptr || facts_type == nullptr || relay_type == nullptr ||
      passage_type == nullptr || call_type == nullptr)
    return nullptr;
  if (PyModule_AddObjectRef(module, "Facts", reinterpret_cast<PyObject*>(facts_type)) != 0 ||
      PyModule_AddObjectRef(module, "Relay", reinterpret_cast<PyObject*>(relay_type)) != 0 ||
      PyModule_AddObjectRef(module, "Call", reinterpret_cast<PyObject*>(call_type)) != 0)
    return nullptr;
  return module;
}
