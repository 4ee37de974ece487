// Which instruction sets were compiled in, and which of them this CPU has.
#pragma once

#include <string>
#include <vector>

#include "table.h"

namespace moesaic {

// Fastest first; the portable one is always there. Behind it what nobody gets who does not ask: it rounds rows.
std::vector<const Table*> available();
// The table with this name, or null.
const Table* find(const std::string& name);
// Whether this process may run it: Linux gives a process the registers of tiles when it asks for them.
bool permitted(const Table* table);

}  // namespace moesaic
