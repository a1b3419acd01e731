"""PyCUDA: the adapter that caps PyCUDA's allocations, and the tracking of its pools and contexts."""
