//! What the reads of a mount tell about programs that know nothing of Fletch.
//!
//! Such a program sends no acknowledgements. A mount sees when the kernel asks it for bytes, and what it
//! delivered. Between two reads the program computes, decodes or sleeps: it *thinks*.
//!
//! I1. The bound is not below the rate that the program would have if the mount answered at once. The time in
//!     which a request travels between kernel and mount counts as thinking: more cache does not change it.
//!
//! That rate is `bytes / think time`, if the program does one thing after the other. If it reads ahead, or
//! has several processes, a part of its thinking falls into reads. Then the mount sees less think time than
//! there is, so the quotient is larger than the rate.

/// What a mount counted since it began. Times are nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MountCounts {
    /// Time in which at least one read was under way.
    pub read_ns: u64,
    /// Time between two reads, in which none was under way, pauses apart.
    pub think_ns: u64,
    /// Reads that the kernel asked for.
    pub reads: u64,
    /// Bytes that the kernel got.
    pub bytes: u64,
    /// Requests of the kernel, other than reads, that only a program in the mount causes.
    pub other_requests: u64,
}

/// Who serves the programs in a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountUse {
    /// No program uses the mount, as far as it can see.
    Idle,
    /// A program uses the mount, and the kernel has all that it reads. More cache is worth nothing to it.
    Kernel,
    /// The mount delivers bytes.
    Reading {
        /// Bytes a second while the program read and thought.
        rate: u64,
        /// Bytes a second if reads took no time, or more. `None` if the program did not think.
        most_rate: Option<u64>,
    },
}

impl MountCounts {
    /// Returns what was counted since an earlier moment; `None` if a counter went back.
    #[must_use]
    pub fn since(&self, before: &MountCounts) -> Option<MountCounts> {
        Some(MountCounts {
            read_ns: self.read_ns.checked_sub(before.read_ns)?,
            think_ns: self.think_ns.checked_sub(before.think_ns)?,
            reads: self.reads.checked_sub(before.reads)?,
            bytes: self.bytes.checked_sub(before.bytes)?,
            other_requests: self.other_requests.checked_sub(before.other_requests)?,
        })
    }
}

fn per_second(bytes: u64, ns: u64) -> Option<u64> {
    let rate = (u128::from(bytes) * 1_000_000_000).checked_div(u128::from(ns))?;
    Some(u64::try_from(rate).unwrap_or(u64::MAX))
}

/// Returns what counts at three moments tell; `None` if a counter went back. The time from `before` to
/// `latest` says who serves the mount now, and the time from `first` to `latest` gives the rates.
#[must_use]
pub fn mount_use(first: &MountCounts, before: &MountCounts, latest: &MountCounts) -> Option<MountUse> {
    let now = latest.since(before)?;
    if now.reads == 0 {
        return Some(if now.other_requests > 0 { MountUse::Kernel } else { MountUse::Idle });
    }
    let all = latest.since(first)?;
    Some(MountUse::Reading {
        rate: per_second(all.bytes, all.read_ns.saturating_add(all.think_ns)).unwrap_or(0),
        most_rate: per_second(all.bytes, all.think_ns),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn counts(read_ns: u64, think_ns: u64, bytes: u64, other_requests: u64) -> MountCounts {
        MountCounts { read_ns, think_ns, reads: bytes / 1000, bytes, other_requests }
    }

    #[test]
    fn a_program_that_reads_and_thinks_has_a_bound() {
        let none = MountCounts::default();
        // 3 s of reads and 1 s of thinking for 8 kB.
        let read = counts(3 * S, S, 8000, 5);
        let reading = |rate, most_rate| Some(MountUse::Reading { rate, most_rate });
        assert_eq!(mount_use(&none, &none, &read), reading(2000, Some(8000)));
        // It goes on without thinking: the window has both parts.
        assert_eq!(mount_use(&none, &read, &counts(7 * S, S, 16_000, 5)), reading(2000, Some(16_000)));
        let copied = counts(S, 0, 8000, 0);
        assert_eq!(mount_use(&none, &none, &copied), reading(8000, None), "a copy never thinks");
        assert_eq!(mount_use(&read, &read, &none), None, "another process counts anew");
        let fast = counts(0, 1, u64::MAX, 0);
        assert_eq!(mount_use(&none, &none, &fast), reading(u64::MAX, Some(u64::MAX)));
    }

    #[test]
    fn a_mount_without_reads_is_served_by_the_kernel_or_idle() {
        let read = counts(3 * S, S, 8000, 5);
        let walked = MountCounts { other_requests: 6, ..read };
        assert_eq!(mount_use(&MountCounts::default(), &read, &walked), Some(MountUse::Kernel));
        assert_eq!(mount_use(&read, &walked, &walked), Some(MountUse::Idle));
    }
}
