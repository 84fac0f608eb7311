//! The pages of the program's file that a process has mapped.
//!
//! A keeper is the whole program, and its start touches pages that it never needs again. The kernel counts
//! them as memory of the process as long as they are mapped.

use nix::errno::Errno;
use std::{fs, io, ops::Range};

/// Unmaps the pages of this process that its files still have. The ones that it uses come back from the page
/// cache.
///
/// # Errors
/// The process cannot see its own mappings.
#[expect(unsafe_code, reason = "only pages that the kernel reads from the same file again")]
pub(super) fn release() -> io::Result<()> {
    for Range { start, end } in unchanged(&fs::read_to_string("/proc/self/smaps")?) {
        let at = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: nobody can write to the mapping, and none of its pages differs from the file. So the kernel
        // fills a page that is used again with the same bytes.
        Errno::result(unsafe { libc::madvise(at, end - start, libc::MADV_DONTNEED) })?;
    }
    Ok(())
}

/// Returns the private, read-only mappings of files of which no page was ever changed. The dynamic linker
/// changes some before it takes the right to write away: those pages are not in the file.
fn unchanged(smaps: &str) -> Vec<Range<usize>> {
    let mut all: Vec<Option<Range<usize>>> = Vec::new();
    for line in smaps.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match (&words[..], all.last_mut()) {
            (["Anonymous:" | "Swap:", size, "kB"], Some(last)) if *size != "0" => *last = None,
            ([range, access, _, _, _, name, ..], _) if name.starts_with('/') => {
                let address = |text| usize::from_str_radix(text, 16).ok();
                let range = range.split_once('-').filter(|_| matches!(*access, "r--p" | "r-xp"));
                all.push(range.and_then(|(start, end)| Some(address(start)?..address(end)?)));
            }
            // Another mapping begins.
            ([range, ..], _) if !range.ends_with(':') => all.push(None),
            _ => {}
        }
    }
    all.into_iter().flatten().collect()
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
        assert_eq!(found, [0x1000..0x3000, 0xc000..0xf000]);
        let swapped = "1000-3000 r--p 0 fe:00 77 /bin/program\nAnonymous: 0 kB\nSwap: 4 kB\n";
        assert!(unchanged(swapped).is_empty());
    }
}
