//! What the allocator gives back.

/// Blocks of at least this many bytes (bodies, decoded images) are pages of their own, and go back to the system when freed.
#[cfg(target_env = "gnu")]
const OWN_PAGES_BYTES: libc::c_int = 1 << 20;
/// Free memory that may stay at the end of an arena, in bytes.
#[cfg(target_env = "gnu")]
const KEPT_BYTES: libc::c_int = 4 << 20;

/// Fixes two limits that glibc otherwise raises with the largest block ever freed: after a few large bodies an idle process would
/// keep over 100 MB. To be called before any thread starts. Other C libraries have no such rule.
pub fn return_large_blocks() {
    #[cfg(target_env = "gnu")]
    #[expect(
        unsafe_code,
        reason = "mallopt has no safe wrapper; it takes plain numbers, and refuses what it does not know"
    )]
    // SAFETY: both parameters are in glibc's documented range, and no other thread allocates yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_PAGES_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
    }
}
