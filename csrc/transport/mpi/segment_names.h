// Open MPI keeps a file in /dev/shm for each rank until MPI_Finalize, so a killed job leaves megabytes behind. Once all
// ranks of a node have mapped each other's files, the names are not needed. So this class removes the name, and creates
// it again for MPI_Finalize to remove.
#pragma once

#include <string>

namespace sordino::mpi {

class SegmentName {
 public:
  // Unlinks this process's file, found among its mappings. Call this only after every rank of the node has attached to
  // it.
  void hide();
  // Creates an empty file of that name, so that MPI_Finalize finds the file that it removes.
  void restore();

 private:
  std::string path_;
};

}  // namespace sordino::mpi
