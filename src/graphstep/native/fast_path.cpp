// The common case of a replay, without Python: is everything as it was at the capture, and if so, launch.
//
// Every answer is "surely as it was" or "look closer"; who gets the second one looks closer in Python, and finds out
// there what has changed and what that means. So nothing is decided here that Python would decide in another way.
//
// Types: Facts (what must be as it was), Pattern (what arguments look like), Relay (the steps of a chain of captured
// layers), Call (stands where a layer is called, and knows the passage that expects it), Passage (one forward pass
// through a relay, under way). Nodes of autograd: Replay and Landmarks.
//
// Each object keeps whatever it refers to in one Python list, `kept`; all other pointers are borrowed from there.

#include "passage.hpp"
#include "pattern.hpp"

namespace {

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
  pattern_type = make_type<PatternValue>("fast_path.Pattern", sizeof(Pattern), pattern_methods, pattern_init);
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
  if (module == nullptr || one == nullptr || facts_type == nullptr || pattern_type == nullptr || relay_type == nullptr ||
      passage_type == nullptr || call_type == nullptr)
    return nullptr;
  if (PyModule_AddObjectRef(module, "Facts", reinterpret_cast<PyObject*>(facts_type)) != 0 ||
      PyModule_AddObjectRef(module, "Pattern", reinterpret_cast<PyObject*>(pattern_type)) != 0 ||
      PyModule_AddObjectRef(module, "Relay", reinterpret_cast<PyObject*>(relay_type)) != 0 ||
      PyModule_AddObjectRef(module, "Call", reinterpret_cast<PyObject*>(call_type)) != 0)
    return nullptr;
  return module;
}
