// Open MPI keeps a file in /dev/shm for each rank until MPI_Finalize, so a killed job leaves megabytes behind. Once all
// ranks of a node have mapped each other's file its name serves nobody: it can go, and come back for Finalize to
// remove.
#pragma once

#include <string>

namespace sordino::mpi {

class SegmentName {
 public:
  // Unlinks this process's file, found among its mappings. Only after every rank of the node has attached to it.
  void hide();
  // Puts an empty file there, so that MPI_Finalize finds what it means to remove.
  void restore();

 private:
  std::string path_;
};

}  // namespace sordino::mpi
