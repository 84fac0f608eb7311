//! The mounts that read through this server, as they announce themselves.
//!
//! 1. (I7) An owner lists, replaces and forgets its own mounts only. An id of another owner is unknown to it.
//! 2. (I6) The announcements of all tenants occupy at most [`MOUNTS_BYTES`]; each tenant has a guaranteed
//!    part.
//! 3. A mount is forgotten [`FORGET_AFTER`] after its last announcement.

use crate::tenancy::{
    auth::{Peer, Principal},
    tenants::{FairPermit, TenantLimit, Tenants},
};
use fletch_api::{AnnounceMount, Mount, MountBenefit, MountReads, MountState, mounts::FORGET_AFTER};
use fletch_core::{
    Domain, MountId, Root, Tenant,
    benefit::{MountCounts, MountUse, mount_use},
};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

/// The bytes that an announcement occupies besides its texts.
const ENTRY_BYTES: u64 = 1024;
/// The counts of a mount that are remembered: those of about a minute.
const COUNTS_MAX: usize = 7;
/// The least time between two counts that are compared. Mounts of many datasets may announce more often.
const BETWEEN_MIN: Duration = Duration::from_secs(5);

/// The owner of a mount.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct MountOwner {
    domain: Domain,
    tenant: Tenant,
    /// The user at the unix socket. Without a tokens file all users are one tenant.
    user: Option<u32>,
}

impl MountOwner {
    /// Returns the owner of the mounts that a caller announces.
    #[must_use]
    pub fn of(principal: &Principal, peer: Peer, has_tokens: bool) -> Self {
        let user = match peer {
            Peer::Unix { uid, .. } if !has_tokens => Some(uid),
            _ => None,
        };
        MountOwner { domain: principal.domain.clone(), tenant: principal.tenant.clone(), user }
    }
}

/// The mounts of a tenant occupy all that the tenant may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the announced mounts of this tenant occupy {used} bytes, and {more} more are not free")]
pub struct TooManyMounts {
    used: u64,
    more: u64,
}

/// The times of an announcement.
#[derive(Debug, Clone, Copy)]
pub struct Announced {
    /// Nanoseconds since the start of the server, by which mounts are forgotten.
    pub now_ns: u64,
    /// Nanoseconds since 1970, which the API shows.
    pub unix_ns: u64,
}

/// The latest counts of one mount's reads.
#[derive(Debug, Default)]
struct ReadHistory {
    /// The version that was read.
    root: Option<Root>,
    /// Each with the time of its announcement, in nanoseconds since the start of the server.
    counts: VecDeque<(u64, MountCounts)>,
}

/// Returns whether too little time passed between two announcements to compare their counts.
fn is_soon(before_ns: u64, now_ns: u64) -> bool {
    u128::from(now_ns.saturating_sub(before_ns)) < BETWEEN_MIN.as_nanos()
}

impl ReadHistory {
    fn note(&mut self, root: Root, reads: Option<MountReads>, now_ns: u64) {
        let Some(r) = reads else { return self.counts.clear() };
        let new = MountCounts {
            read_ns: r.read_ns,
            think_ns: r.think_ns,
            reads: r.reads,
            bytes: r.bytes,
            other_requests: r.other_requests,
        };
        let is_other = self.root.replace(root) != Some(root);
        if is_other || self.counts.back().is_some_and(|(_, last)| new.since(last).is_none()) {
            self.counts.clear();
        }
        if let [.., (before, _), last] = self.counts.make_contiguous()
            && is_soon(*before, last.0)
        {
            *last = (now_ns, new);
            return;
        }
        if self.counts.len() == COUNTS_MAX {
            self.counts.pop_front();
        }
        self.counts.push_back((now_ns, new));
    }

    fn benefit(&self) -> Option<MountBenefit> {
        let (_, first) = self.counts.front()?;
        let (at, latest) = self.counts.back()?;
        let (_, before) = self.counts.iter().rev().find(|(before, _)| !is_soon(*before, *at))?;
        let without = |state| MountBenefit { state, rate: None, most_rate: None };
        Some(match mount_use(first, before, latest)? {
            MountUse::Idle => without(MountState::Idle),
            MountUse::Kernel => without(MountState::Kernel),
            MountUse::Reading { rate, most_rate } => {
                MountBenefit { state: MountState::Reading, rate: Some(rate), most_rate }
            }
        })
    }
}

struct Entry {
    announced: AnnounceMount,
    reads: ReadHistory,
    at: Announced,
    permit: FairPermit,
    bytes: u64,
}

impl Entry {
    fn is_live(&self, now_ns: u64) -> bool {
        u128::from(now_ns.saturating_sub(self.at.now_ns)) < FORGET_AFTER.as_nanos()
    }
}

type Table = BTreeMap<(MountOwner, MountId), Entry>;

/// The announced mounts of all owners.
pub struct AnnouncedMounts {
    tenants: Arc<Tenants>,
    table: Mutex<Table>,
}

impl AnnouncedMounts {
    /// Returns an empty table.
    #[must_use]
    pub fn new(tenants: Arc<Tenants>) -> Self {
        AnnouncedMounts { tenants, table: Mutex::default() }
    }

    /// Returns the table without the mounts that are forgotten as of `now_ns`.
    fn live(&self, now_ns: u64) -> MutexGuard<'_, Table> {
        let mut table = self.table.lock();
        table.retain(|_, entry| entry.is_live(now_ns));
        table
    }

    /// Remembers a mount of `owner`, in place of the one with the same id.
    ///
    /// # Errors
    /// [`TooManyMounts`], which is counted. The older announcement of the id is then forgotten.
    pub fn announce(
        &self,
        owner: MountOwner,
        id: MountId,
        announced: AnnounceMount,
        at: Announced,
    ) -> Result<(), TooManyMounts> {
        let a = &announced;
        let problem = a.problem.as_deref().unwrap_or_default();
        let texts = [a.dataset.as_str(), &a.dir, &a.host, a.job.as_str(), &a.version, id.as_str(), problem];
        let bytes = ENTRY_BYTES + texts.iter().map(|t| t.len() as u64).sum::<u64>();
        let mut table = self.live(at.now_ns);
        let tenant = owner.tenant.clone();
        let key = (owner, id);
        let (mut reads, permit) = match table.remove(&key) {
            Some(old) if old.bytes == bytes => (old.reads, old.permit),
            old => {
                // The permit of the old one is free for the new one.
                let reads = old.map(|old| old.reads).unwrap_or_default();
                let permits = &self.tenants.mount_bytes;
                let permit = permits.try_acquire(&tenant, bytes).map_err(|_| {
                    self.tenants.count_refusal(&tenant, TenantLimit::MountBytes);
                    TooManyMounts { used: permits.of(&tenant).used, more: bytes }
                })?;
                (reads, permit)
            }
        };
        reads.note(announced.root, announced.reads, at.now_ns);
        table.insert(key, Entry { announced, reads, at, permit, bytes });
        Ok(())
    }

    /// Forgets a mount of `owner`, if the server knows it.
    pub fn forget(&self, owner: MountOwner, id: MountId) {
        self.table.lock().remove(&(owner, id));
    }

    /// Returns the mounts of `owner`, or of all owners, in the order of their ids.
    #[must_use]
    pub fn list(&self, owner: Option<&MountOwner>, now_ns: u64) -> Vec<Mount> {
        let table = self.live(now_ns);
        let seen = table.iter().filter(|((of, _), _)| owner.is_none_or(|owner| of == owner));
        let mut mounts: Vec<_> = seen
            .map(|((_, id), e)| Mount {
                id: id.clone(),
                announced: e.announced.clone(),
                seen_ns: e.at.unix_ns,
                benefit: e.reads.benefit(),
            })
            .collect();
        mounts.sort_by(|a, b| a.id.cmp(&b.id));
        mounts
    }

    /// Returns the number of mounts of all owners.
    #[must_use]
    pub fn count(&self, now_ns: u64) -> usize {
        self.live(now_ns).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{app::config, tenancy::auth::Quota};
    use fletch_api::mounts::DIR_BYTES_MAX;
    use fletch_core::{Hash, Root};

    fn tenant(name: &str) -> Tenant {
        Tenant::new(name).expect("a name")
    }

    fn mounts() -> AnnouncedMounts {
        let environment =
            config::Environment { home: Some("/home/u".into()), ..config::Environment::default() };
        let Ok(config::Action::Serve(config)) = config::read(["fletch-server"], &environment) else {
            panic!("settings")
        };
        let known = ["a", "b"].map(|name| (tenant(name), Quota::default()));
        AnnouncedMounts::new(Tenants::new(config.limits, known.into()))
    }

    fn owner(name: &str) -> MountOwner {
        MountOwner { domain: Domain::default_domain(), tenant: tenant(name), user: None }
    }

    fn id(n: usize) -> MountId {
        MountId::new(&format!("m{n}")).expect("a name")
    }

    fn announced(dir: &str) -> AnnounceMount {
        AnnounceMount {
            dataset: "d".parse().expect("name"),
            root: Root(Hash::of(b"root")),
            dir: dir.to_owned(),
            host: "node7".to_owned(),
            pid: 7,
            job: "j".parse().expect("name"),
            version: "latest".to_owned(),
            problem: None,
            reads: None,
        }
    }

    fn at(seconds: u64) -> Announced {
        Announced { now_ns: seconds * 1_000_000_000, unix_ns: 1_000 + seconds }
    }

    #[test]
    fn a_mount_is_forgotten_30_s_after_its_last_announcement() {
        let mounts = mounts();
        mounts.announce(owner("a"), id(1), announced("/x"), at(0)).expect("room");
        mounts.announce(owner("a"), id(2), announced("/y"), at(10)).expect("room");
        mounts.announce(owner("a"), id(1), announced("/z"), at(20)).expect("room");
        let seen = |seconds| {
            let list = mounts.list(Some(&owner("a")), at(seconds).now_ns);
            list.into_iter().map(|m| (m.announced.dir, m.seen_ns)).collect::<Vec<_>>()
        };
        assert_eq!(seen(39), [("/z".to_owned(), 1_020), ("/y".to_owned(), 1_010)]);
        assert_eq!(seen(40), [("/z".to_owned(), 1_020)]);
        assert_eq!((mounts.count(at(49).now_ns), mounts.count(at(50).now_ns)), (1, 0));
        assert_eq!(mounts.tenants.mount_bytes.used(), 0, "a forgotten mount holds nothing");
    }

    #[test]
    fn the_counts_of_about_a_minute_tell_what_cache_is_worth() {
        let mounts = mounts();
        let benefit = |seconds| mounts.list(None, at(seconds).now_ns)[0].benefit;
        // 1 MB in 2 s of reads and 2 s of thinking every 10 s.
        let reads = |rounds: u64| {
            let reads = MountReads { reads: rounds * 10, bytes: rounds * 1_000_000, ..MountReads::default() };
            MountReads { read_ns: rounds * 2_000_000_000, think_ns: rounds * 2_000_000_000, ..reads }
        };
        let announce = |seconds, reads, dir: &str| {
            let new = AnnounceMount { reads, ..announced(dir) };
            mounts.announce(owner("a"), id(1), new, at(seconds)).expect("room");
        };
        announce(0, Some(reads(0)), "/x");
        assert_eq!(benefit(0), None, "once tells nothing");
        let of = |rate, most| MountBenefit { state: MountState::Reading, rate, most_rate: most };
        for round in 1..20 {
            announce(round * 10, Some(reads(round)), "/x");
            assert_eq!(benefit(round * 10), Some(of(Some(250_000), Some(500_000))), "{round}");
        }
        // Another size of the announcement, soon after: the same counts.
        announce(191, Some(reads(19)), "/another");
        assert_eq!(benefit(191), Some(of(Some(250_000), Some(500_000))));
        let walked = MountReads { other_requests: 3, ..reads(19) };
        announce(201, Some(walked), "/another");
        let without = |state| Some(MountBenefit { state, rate: None, most_rate: None });
        assert_eq!(benefit(201), without(MountState::Kernel));
        announce(211, Some(walked), "/another");
        assert_eq!(benefit(211), without(MountState::Idle));
        // The version changed, or the mount counts anew.
        announce(221, Some(reads(1)), "/another");
        assert_eq!(benefit(221), None);
        let other =
            AnnounceMount { reads: Some(reads(2)), root: Root(Hash::of(b"other")), ..announced("/x") };
        mounts.announce(owner("a"), id(1), other, at(231)).expect("room");
        assert_eq!(benefit(231), None);
        announce(241, None, "/x");
        assert_eq!(benefit(241), None, "an older mount");
        let entry = mounts.live(at(241).now_ns).values().map(|e| e.reads.counts.capacity()).sum::<usize>();
        assert!(entry * size_of::<(u64, MountCounts)>() < ENTRY_BYTES as usize, "{entry}");
    }

    #[test]
    fn the_mounts_of_one_tenant_leave_room_for_another() {
        let mounts = mounts();
        let long = "x".repeat(DIR_BYTES_MAX);
        let full =
            (0..10_000).find(|n| mounts.announce(owner("a"), id(*n), announced(&long), at(0)).is_err());
        let full = full.expect("a bound");
        assert!(full > 500, "{full}");
        assert_eq!(mounts.tenants.refusals().iter().map(|(_, _, n)| n).sum::<u64>(), 1);
        mounts.announce(owner("a"), id(0), announced(&long), at(1)).expect("the same mount again");
        mounts.announce(owner("b"), id(0), announced(&long), at(1)).expect("the other tenant's part");
        assert_eq!(mounts.list(Some(&owner("b")), at(1).now_ns).len(), 1);
        mounts.forget(owner("b"), id(1));
        assert_eq!(mounts.list(None, at(1).now_ns).len(), full + 1, "an id of another owner is unknown");
    }
}
