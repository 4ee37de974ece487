// Which instruction sets were compiled, and which of them this CPU supports.
#pragma once

#include <string>
#include <vector>

#include "table.h"

namespace moesaic {

// The sets in order of speed, the portable one last. After it come sets that are only used by name: they round rows.
std::vector<const Table*> available();
// Returns the table with this name, or null.
const Table* find(const std::string& name);
// Whether this process may use it. A Linux process must ask for the tile registers before it uses them.
bool permitted(const Table* table);

}  // namespace moesaic
