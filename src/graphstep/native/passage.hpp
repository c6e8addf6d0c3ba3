// Passage: one forward pass through a relay, under way. Call: stands where a layer is called.

#pragma once

#include "node.hpp"

namespace {

// ----- Passage

void let_go(Call* call) {
  Passage* passage = std::exchange(call->value.passage, nullptr);
  Py_XDECREF(passage);
}

// A passage that expects nothing any more. What was launched ahead for calls that will not come is undone, unless
// others go on with the run. False, with Python's error set, if that cannot be done.
bool end(Passage* self, bool goes_on = false) {
  Way& way = self->value;
  if (way.relay == nullptr) return true;
  if (way.is_running) {
    way.is_doomed = true;
    return true;
  }
  Py_INCREF(self);
  auto* call = reinterpret_cast<Call*>(way.relay->value.steps[way.next].call);
  PyObject* kept = std::exchange(self->kept, PyList_New(0));
  PyObject* watchers = std::exchange(way.watchers, nullptr);
  PyObject* handles = way.handles;
  PyObject* run = way.relay->value.keeps_state && !goes_on ? way.run : nullptr;
  way = Way();
  if (call->value.passage == self) let_go(call);
  if (PyList_Check(handles)) PyList_SetSlice(handles, 0, PyList_GET_SIZE(handles), nullptr);
  Py_XDECREF(watchers);
  PyObject* nothing = run == nullptr ? Py_NewRef(Py_None) : PyObject_CallMethodNoArgs(run, names[UNDO_AHEAD]);
  Py_XDECREF(nothing);
  Py_XDECREF(kept);
  Py_DECREF(self);
  return nothing != nullptr;
}

// The same where an error is under way, or nobody is there to be told of one.
void end_anyway(Passage* self) {
  PyObject *kind, *error, *trace;
  PyErr_Fetch(&kind, &error, &trace);
  if (!end(self)) PyErr_WriteUnraisable(reinterpret_cast<PyObject*>(self));
  PyErr_Restore(kind, error, trace);
}

// What was handed out is gone: nobody can call the next layer with it.
PyObject* passage_gone(PyObject* object, PyObject*) {
  if (!end(reinterpret_cast<Passage*>(object))) return nullptr;
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
  if (call->value.passage != nullptr && !end(call->value.passage)) return false;
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
  if (step.is_kept && !forget_first(way.run, AHEAD_OF_CALLS)) return nullptr;  // Its call has come.
  PyObject* versions = PyList_New(static_cast<Py_ssize_t>(step.outputs.size()));
  if (versions == nullptr) return nullptr;
  // Anything that autograd saved from the last replay's outputs is now stale; autograd checks versions. Those that share
  // memory share their version too.
  for (PyObject* output : step.outputs) impl_of(output)->bump_version();
  for (size_t i = 0; i < step.outputs.size(); ++i) {
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
    {"step", guarded<relay_step>, METH_VARARGS, "step(...): add the next step; see the source."},
    {"home", guarded<relay_home>, METH_VARARGS, "home(home, leaf, address, is_main): where a gradient lives."},
    {"handover", guarded<relay_handover>, METH_VARARGS, "handover(place, output): an argument that is a result of the one before."},
    {"begin", guarded<relay_begin>, METH_VARARGS, "begin(run, span, versions, handles, arguments, named, ambient, first)"},
    {"landmarks", guarded<relay_landmarks>, METH_O, "landmarks(first): parameters whose gradients tell which pass it is."},
    {"results", guarded<relay_results>, METH_O, "results(first): tensors over the outputs of all steps from there on."},
    {"backward", guarded<relay_backward>, METH_VARARGS, "backward(session, grad_outputs, incoming): see the source."},
    {"replay", guarded<relay_replay>, METH_VARARGS, "replay(run, stop, tensors, leaves, landmarks, skipped): see the source."},
    {"launch_backward", guarded<relay_launch_backward>, METH_NOARGS, "launch_backward(): launch all backward halves, last first."},
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
  end(passage, true);
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
    bool is_match = false;
    try {
      is_match = matches(passage, arguments, PyVectorcall_NARGS(flags), keywords) && !way.is_doomed;
    } catch (const std::exception&) {
      // Whoever looks closer will meet it.
    }
    PyErr_Clear();
    PyObject* result = nullptr;
    if (is_match) {
      if (self->value.passage == passage) let_go(self);
      try {
        result = advance(passage, self->value.takes_first);
      } catch (const std::exception& error) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
      }
    }
    way.is_running = false;
    bool is_over = way.is_doomed || (is_match && result == nullptr);
    bool is_well = true;
    if (is_over) {
      end_anyway(passage);
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

// Expect it no more, and let go of the results that were not asked for.
PyObject* call_drop(PyObject* object, PyObject*) {
  Passage* passage = reinterpret_cast<Call*>(object)->value.passage;
  if (passage != nullptr && !end(passage)) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef call_methods[] = {
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
  if (passage != nullptr) end_anyway(passage);
  call_clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

}  // namespace
