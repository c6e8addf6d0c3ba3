"""The common case of a replay, in C++: built where there is a compiler, and never needed."""
