# Finds UCX: first the wheel (libucx-cu12, libucx-cu13) of the Python that runs the build, then the system's. Sets
# SORDINO_UCX_INCLUDES, SORDINO_UCX_LIBRARY (the libucp file) and SORDINO_UCX_DESCRIPTION; all empty if there is none.
set(SORDINO_UCX_INCLUDES "")
set(SORDINO_UCX_LIBRARY "")
set(SORDINO_UCX_DESCRIPTION "")

# pip builds where packages that are installed cannot be imported, though their folder is known.
execute_process(COMMAND "${Python_EXECUTABLE}" -c "
import importlib.util, sysconfig
found = importlib.util.find_spec('libucx')
print(found.submodule_search_locations[0] if found else sysconfig.get_path('platlib') + '/libucx')"
                OUTPUT_VARIABLE wheel ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
if(wheel AND EXISTS "${wheel}/include/ucp/api/ucp.h" AND EXISTS "${wheel}/lib/libucp.so")
  set(SORDINO_UCX_INCLUDES "${wheel}/include")
  set(SORDINO_UCX_LIBRARY "${wheel}/lib/libucp.so")
else()
  find_path(ucx_includes ucp/api/ucp.h NO_CACHE)
  find_library(ucx_library ucp NO_CACHE)
  if(ucx_includes AND ucx_library)
    set(SORDINO_UCX_INCLUDES "${ucx_includes}")
    set(SORDINO_UCX_LIBRARY "${ucx_library}")
  endif()
endif()
if(NOT SORDINO_UCX_LIBRARY)
  message(STATUS "No UCX found: building without it (between nodes by MPI)")
  return()
endif()

file(STRINGS "${SORDINO_UCX_INCLUDES}/ucp/api/ucp_version.h" lines REGEX "#define UCP_API_(MAJOR|MINOR) ")
string(REGEX REPLACE "[^0-9;]" "" numbers "${lines}")
string(REPLACE ";" "." version "${numbers}")
set(SORDINO_UCX_DESCRIPTION "UCX ${version}")
message(STATUS "UCX: ${SORDINO_UCX_DESCRIPTION}, ${SORDINO_UCX_LIBRARY}")
