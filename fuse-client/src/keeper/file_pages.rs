//! The pages of the program's file that a process has mapped.
//!
//! A keeper is the whole program, and its start touches pages that it never needs again. The kernel counts
//! them as memory of the process as long as they are mapped.

use nix::errno::Errno;
use std::{fs, io};

/// A mapping of a file as `/proc/self/smaps` describes it.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    from: usize,
    bytes: usize,
}

/// Unmaps the pages of this process that its files still have. The ones that it uses come back from the page
/// cache.
///
/// # Errors
/// The process cannot see its own mappings.
#[expect(unsafe_code, reason = "only pages that the kernel reads from the same file again")]
pub(super) fn release() -> io::Result<()> {
    for Mapping { from, bytes } in unchanged(&fs::read_to_string("/proc/self/smaps")?) {
        let from = std::ptr::with_exposed_provenance_mut(from);
        // SAFETY: nobody can write to the mapping, and none of its pages differs from the file. So the kernel
        // fills a page that is used again with the same bytes.
        Errno::result(unsafe { libc::madvise(from, bytes, libc::MADV_DONTNEED) })?;
    }
    Ok(())
}

/// Returns the private, read-only mappings of files of which no page was ever changed. The dynamic linker
/// changes some before it takes the right to write away: those pages are not in the file.
fn unchanged(smaps: &str) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
    let mut is_candidate = false;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (Some(first), Some(second)) = (words.next(), words.next()) else { continue };
        if first.ends_with(':') {
            let is_changed = matches!(first, "Anonymous:" | "Swap:") && second != "0";
            if is_changed && std::mem::take(&mut is_candidate) {
                found.pop();
            }
            continue;
        }
        let range = first.split_once('-').map(|(from, to)| [from, to].map(|n| usize::from_str_radix(n, 16)));
        let is_of_a_file = words.nth(3).is_some_and(|name| name.starts_with('/'));
        is_candidate = is_of_a_file && matches!(second, "r--p" | "r-xp");
        match range {
            Some([Ok(from), Ok(to)]) if is_candidate => found.push(Mapping { from, bytes: to - from }),
            _ => is_candidate = false,
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mappings_that_equal_their_file_are_released() {
        let mapping = |range: &str, access: &str, name: &str, anonymous: u32| {
            format!(
                "{range} {access} 00001000 fe:00 77 {name}\nSize: 8 kB\nAnonymous: {anonymous} kB\n\
                 Swap: 0 kB\nVmFlags: rd mr\n"
            )
        };
        let smaps = [
            mapping("1000-3000", "r-xp", "/bin/program", 0),
            mapping("3000-5000", "r--p", "/bin/program", 8),
            mapping("5000-7000", "rw-p", "/bin/program", 0),
            mapping("7000-9000", "r--s", "/dev/shm/memory", 0),
            mapping("9000-b000", "r--p", "", 0),
            mapping("b000-c000", "r-xp", "[vdso]", 0),
            mapping("c000-f000", "r--p", "/lib/a library", 0),
        ];
        let found = unchanged(&smaps.concat());
        let mapping = |from, bytes| Mapping { from, bytes };
        assert_eq!(found, [mapping(0x1000, 0x2000), mapping(0xc000, 0x3000)]);
        let swapped = "1000-3000 r--p 0 fe:00 77 /bin/program\nAnonymous: 0 kB\nSwap: 4 kB\n";
        assert_eq!(unchanged(swapped), []);
    }
}
