//! The shares of datasets in the disk tier, by which datasets were read in the last hour.
//!
//! Until jobs are measured, the disk is divided equally among what datasets want. Requests note what they
//! read. The owner of the disk asks for a new split when the wants changed.
//!
//! A sweep, an ordered epoch and a warm-up want their whole version. Plain readers want what they asked for:
//! the want of their dataset starts at zero and grows with their reads. So one plain read of a file takes
//! only the room of that file from a sweep. What nobody wants goes to whoever can use it.
//!
//! A dataset has no share of its own while a sweep goes over it and only ordered epochs read it. An ordered
//! epoch reads each sample once, so it hits the same part of the samples in the sweep's share as in a share
//! of its own. The sweep's jobs share what it keeps, so the sweep makes more of the space (ADR 44).
//!
//! A dataset and the sweeps over it are one *pool* of the disk: they read the same chunks, and each chunk
//! counts once. So a pool never gets more than its chunks need (ADR 80).
//!
//! A server of a cluster keeps only the chunks that it owns. So a version wants [`Part::of`] its footprint
//! here, except that of a sweep, which keeps its units on its own server.
//!
//! Invariant (I6): at most [`VERSIONS_MAX`] versions are remembered. Further versions get no share of their
//! own, only the space that the others leave.

use crate::{
    dataset_id::DatasetId,
    disk::{Claim, Pool, split_by_claims},
    disk_tier::DiskTier,
};
use fletch_core::Root;
use parking_lot::{Mutex, RwLock};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};
use tokio::sync::Notify;

/// Time without a read after which a version is idle.
const IDLE_AFTER: Duration = Duration::from_secs(3600);
/// Most versions that are remembered.
const VERSIONS_MAX: usize = 65_536;

/// The claims by which the disk is divided.
pub type Split = Vec<Claim>;

/// What the chunks of a version need on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// The most bytes that its chunks can occupy.
    pub bytes: u64,
    /// The number of its chunks.
    pub chunks: u64,
}

/// The part of all chunks that this server owns: its weight over the weights of all members, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Part(f64);

impl Part {
    /// All chunks, as for a server that is alone.
    pub const ALL: Part = Part(1.0);

    /// Returns the part of a member with `weight` among members with `all` in sum. A member without a weight
    /// keeps what it has, so its part is not less than all.
    #[must_use]
    pub fn new(weight: u64, all: u64) -> Self {
        if weight == 0 || all <= weight { Part::ALL } else { Part(weight as f64 / all as f64) }
    }

    /// Returns the part of a number of bytes.
    #[must_use]
    pub fn of_bytes(self, bytes: u64) -> u64 {
        if self == Part::ALL { bytes } else { (bytes as f64 * self.0) as u64 }
    }

    /// Returns the most bytes that a server with this part may own of a version: the mean and four standard
    /// deviations, because chunks are placed at random (a binomial distribution).
    #[must_use]
    pub fn of(self, footprint: Footprint) -> u64 {
        if self == Part::ALL {
            return footprint.bytes;
        }
        let spread = 4.0 * (self.0 * (1.0 - self.0) / footprint.chunks.max(1) as f64).sqrt();
        (footprint.bytes as f64 * (self.0 + spread).min(1.0)) as u64
    }
}

/// The kind of a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReaderKind {
    /// A reader in any order, such as a mount.
    Plain,
    /// A warm-up, which reads the whole version for plain readers.
    Warmup,
    /// An ordered epoch, which reads each sample once.
    Ordered,
    /// A sweep, which keeps its chunks under a number of its own.
    Sweep,
}

/// The datasets of the disk tier under which the chunks of one version in one layout are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionIds {
    /// The dataset of its plain readers.
    pub plain: DatasetId,
    /// The sweep over it.
    pub sweep: DatasetId,
}

/// The reads of one version.
#[derive(Debug)]
struct VersionReads {
    ids: VersionIds,
    /// Time of the last read, in nanoseconds since the start.
    last: AtomicU64,
    /// Time of the last read by a plain reader or a warm-up, plus one; 0 for never.
    last_plain: AtomicU64,
    /// Time of the last warm-up, plus one; 0 for never.
    last_warmup: AtomicU64,
    footprint: Footprint,
    kind: ReaderKind,
}

impl VersionReads {
    fn new(ids: VersionIds, footprint: Footprint, kind: ReaderKind) -> Self {
        let never = || AtomicU64::new(0);
        VersionReads { ids, last: never(), last_plain: never(), last_warmup: never(), footprint, kind }
    }

    /// Notes a read, and returns whether it may change the split.
    fn note(&self, kind: ReaderKind, now_ns: u64) -> bool {
        self.last.fetch_max(now_ns, Relaxed);
        let first = |last: &AtomicU64| last.fetch_max(now_ns.saturating_add(1), Relaxed) == 0;
        match kind {
            ReaderKind::Plain => first(&self.last_plain),
            ReaderKind::Warmup => first(&self.last_plain) | first(&self.last_warmup),
            ReaderKind::Ordered | ReaderKind::Sweep => false,
        }
    }

    fn within(at: u64, now_ns: u64) -> bool {
        now_ns.saturating_sub(at) < u64::try_from(IDLE_AFTER.as_nanos()).unwrap_or(u64::MAX)
    }

    fn lately(last: &AtomicU64, now_ns: u64) -> bool {
        let last = last.load(Relaxed);
        last > 0 && Self::within(last, now_ns)
    }

    /// Whether the dataset needs a share of its own, even if a sweep goes over it.
    fn needs_own_share(&self, now_ns: u64) -> bool {
        self.kind == ReaderKind::Sweep || Self::lately(&self.last_plain, now_ns)
    }

    /// Whether its readers read all of the version, so that it wants its whole footprint.
    fn wants_all(&self, swept: bool, now_ns: u64) -> bool {
        match self.kind {
            ReaderKind::Sweep => true,
            // Its epochs read what the sweep keeps.
            ReaderKind::Ordered if !swept => true,
            _ => Self::lately(&self.last_warmup, now_ns),
        }
    }
}

/// The versions that were read lately, and the split that was applied last.
#[derive(Debug, Default)]
pub struct Shares {
    read: RwLock<HashMap<(DatasetId, Root), VersionReads>>,
    /// What plain readers of each dataset want, in footprints. It grows until the dataset is idle.
    wants: Mutex<HashMap<DatasetId, u64>>,
    /// The datasets that plain readers or warm-ups read.
    plain: Mutex<BTreeSet<DatasetId>>,
    /// The sweeps over versions that are read, whether one goes on or not, with the datasets of their plain
    /// readers.
    sweeps: Mutex<BTreeSet<(DatasetId, DatasetId)>>,
    /// The split that was applied last.
    applied: Mutex<Option<Split>>,
    /// The parts of quotas that the datasets got with it, where a dataset wanted more.
    quota_parts: Mutex<BTreeMap<DatasetId, u64>>,
    /// The capacity of the tier at that time, in footprints.
    capacity: AtomicU64,
    part: Mutex<Option<Part>>,
    changed: Notify,
}

/// What a dataset of a tenant has on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaUse {
    /// The dataset.
    pub dataset: DatasetId,
    /// The dataset of the plain readers with which it shares chunks: itself, unless it is a sweep.
    pub plain: DatasetId,
    /// Footprints of its chunks.
    pub bytes: u64,
}

/// A tenant's quota on disk, and what all of its datasets have there now.
pub type TenantQuota = (u64, Vec<QuotaUse>);

/// Limits a split by the quotas of tenants. Pure.
///
/// All datasets of a tenant, idle ones included, divide its quota by their claims. None may use more than its
/// part. An idle dataset wants what it has, and no more. It wants nothing if others of its pool are read:
/// they find its chunks.
#[must_use]
pub fn apply_quotas(split: Split, quotas: &[TenantQuota]) -> Split {
    let pools: BTreeMap<DatasetId, Pool> = split.iter().map(|c| (c.pool.plain, c.pool)).collect();
    let mut limited: BTreeMap<DatasetId, Claim> = split.into_iter().map(|c| (c.dataset, c)).collect();
    for (quota, datasets) in quotas {
        let idle = |used: &QuotaUse| match pools.get(&used.plain) {
            Some(&pool) => Claim { dataset: used.dataset, want: Some(0), most: Some(0), pool },
            None => {
                let pool = Pool { plain: used.plain, most: None };
                Claim { pool, ..Claim::alone(used.dataset, Some(used.bytes), Some(used.bytes)) }
            }
        };
        let claims: Vec<Claim> =
            datasets.iter().map(|d| limited.get(&d.dataset).copied().unwrap_or_else(|| idle(d))).collect();
        let wants: HashMap<_, _> = claims.iter().filter_map(|c| Some((c.dataset, c.want?))).collect();
        for (id, part) in split_by_claims(*quota, &claims) {
            let want = wants.get(&id).map_or(part, |want| part.min(*want));
            let pool = claims.iter().find(|c| c.dataset == id).map(|c| c.pool);
            let claim = Claim::alone(id, Some(want), Some(part));
            limited.insert(id, Claim { pool: pool.unwrap_or(claim.pool), ..claim });
        }
    }
    limited.into_values().collect()
}

/// Returns the datasets of a split that get less of a quota than they want, and what they get. Pure.
fn quota_parts(split: &Split, limited: &Split) -> BTreeMap<DatasetId, u64> {
    let wants: BTreeMap<DatasetId, Option<u64>> = split.iter().map(|c| (c.dataset, c.want)).collect();
    let part = |limited: &Claim| {
        let (want, part) = (*wants.get(&limited.dataset)?, limited.most?);
        want.is_none_or(|want| part < want).then_some((limited.dataset, part))
    };
    limited.iter().filter_map(part).collect()
}

/// Returns the capacity of a disk, in footprints.
fn capacity(disk: &DiskTier) -> u64 {
    disk.engine().map_or(0, |t| t.capacity())
}

/// Returns what plain readers want after they asked for `demand` in all. Pure.
///
/// It grows by an eighth at least, so that a dataset that is read for the first time changes the split a few
/// dozen times, and not in each round.
fn grown(want: u64, demand: u64) -> u64 {
    if demand <= want { want } else { demand.max(want.saturating_add(want / 8)) }
}

/// Whether the capacity changed so much that the disk must be divided again. Pure.
///
/// The capacity changes with the mean length of the records. A falling share evicts chunks, so the split
/// tolerates a capacity that is up to 2 % lower.
fn capacity_changed(then: u64, now: u64) -> bool {
    now > then.saturating_add(then / 1000) || now < then.saturating_sub(then / 50)
}

impl Shares {
    /// Returns the part of all chunks that this server owns.
    #[must_use]
    pub fn part(&self) -> Part {
        self.part.lock().unwrap_or(Part::ALL)
    }

    /// Sets the part of all chunks that this server owns. Has the disk divided anew if that changed.
    pub fn set_part(&self, part: Part) {
        let before = self.part.lock().replace(part);
        if before.unwrap_or(Part::ALL) != part {
            self.divide_anew();
        }
    }

    /// Notes that a version of a dataset is read.
    ///
    /// `root` tells the versions of a dataset apart.
    pub fn note(&self, ids: VersionIds, root: Root, footprint: Footprint, kind: ReaderKind, now_ns: u64) {
        let version = (if kind == ReaderKind::Sweep { ids.sweep } else { ids.plain }, root);
        let known = self.read.read().get(&version).map(|r| r.note(kind, now_ns));
        let may_change = known.unwrap_or_else(|| {
            let mut read = self.read.write();
            let room = read.len() < VERSIONS_MAX;
            if room {
                read.entry(version)
                    .or_insert_with(|| VersionReads::new(ids, footprint, kind))
                    .note(kind, now_ns);
            }
            room
        });
        if may_change {
            self.changed.notify_one();
        }
    }

    /// Waits until a read may have changed the split.
    pub async fn wait_for_change(&self) {
        self.changed.notified().await;
    }

    /// Returns the next split, if its datasets or the capacity of `disk` changed since the last call.
    ///
    /// Forgets idle versions. A capacity above the applied shares would be free for any dataset, so it counts
    /// too.
    pub fn next_split(&self, disk: &DiskTier, now_ns: u64) -> Option<Split> {
        if capacity_changed(self.capacity.load(Relaxed), capacity(disk)) {
            self.forget_applied();
        }
        self.changed_split(&disk.take_demand(), now_ns)
    }

    /// Forgets idle versions, and returns the claims of the others if they differ from the last call.
    ///
    /// `demand` is what each dataset has and was refused, in footprints.
    fn changed_split(&self, demand: &HashMap<DatasetId, u64>, now_ns: u64) -> Option<Split> {
        /// The versions of one dataset together.
        #[derive(Default)]
        struct Sum {
            footprint: u64,
            /// The most that this server keeps of them.
            kept: u64,
            wants_all: u64,
            plain: bool,
            pool: Option<DatasetId>,
        }
        let part = self.part();
        let mut sums: BTreeMap<DatasetId, Sum> = BTreeMap::new();
        // By pool and version: what the version's chunks need.
        let mut pools: BTreeMap<DatasetId, BTreeMap<DatasetId, u64>> = BTreeMap::new();
        {
            let mut read = self.read.write();
            read.retain(|_, r| VersionReads::within(r.last.load(Relaxed), now_ns));
            // A sweep keeps nothing of another version.
            let over = |((_, root), r): (&(DatasetId, Root), &VersionReads)| {
                (r.kind == ReaderKind::Sweep).then_some((r.ids.plain, *root))
            };
            let swept: HashSet<(DatasetId, Root)> = read.iter().filter_map(over).collect();
            *self.sweeps.lock() = read.values().map(|r| (r.ids.sweep, r.ids.plain)).collect();
            for (version, r) in read.iter() {
                let need = pools.entry(r.ids.plain).or_default().entry(r.ids.sweep).or_default();
                *need = (*need).max(r.footprint.bytes);
                let swept = swept.contains(version);
                if swept && !r.needs_own_share(now_ns) {
                    continue;
                }
                let sum = sums.entry(version.0).or_default();
                sum.pool = Some(r.ids.plain);
                let kept = match r.kind {
                    ReaderKind::Sweep => r.footprint.bytes,
                    ReaderKind::Plain | ReaderKind::Warmup | ReaderKind::Ordered => part.of(r.footprint),
                };
                sum.footprint = sum.footprint.saturating_add(r.footprint.bytes);
                sum.kept = sum.kept.saturating_add(kept);
                sum.plain |= VersionReads::lately(&r.last_plain, now_ns);
                if r.wants_all(swept, now_ns) {
                    sum.wants_all = sum.wants_all.saturating_add(kept);
                }
            }
        }
        *self.plain.lock() = sums.iter().filter(|(_, sum)| sum.plain).map(|(id, _)| *id).collect();
        let mut wants = self.wants.lock();
        wants.retain(|dataset, _| sums.contains_key(dataset));
        let claim = |(dataset, sum): (DatasetId, Sum)| {
            let want = wants.entry(dataset).or_default();
            *want = grown(*want, demand.get(&dataset).copied().unwrap_or(0));
            let want = (*want).max(sum.wants_all).min(sum.kept);
            let plain = sum.pool.unwrap_or(dataset);
            let most =
                pools.get(&plain).map(|versions| versions.values().fold(0, |a, b| b.saturating_add(a)));
            Claim { dataset, want: Some(want), most: Some(sum.footprint), pool: Pool { plain, most } }
        };
        let split: Split = sums.into_iter().map(claim).collect();
        drop(wants);
        let mut applied = self.applied.lock();
        (applied.as_ref() != Some(&split)).then(|| applied.insert(split).clone())
    }

    /// Applies a split. Without an open tier, the next call of `next_split` returns it again.
    pub fn apply(&self, disk: &DiskTier, split: &Split) {
        self.capacity.store(capacity(disk), Relaxed);
        let sweeps: Vec<(DatasetId, DatasetId)> = self.sweeps.lock().iter().copied().collect();
        match disk.divide(split, &sweeps) {
            Some(evicted) => {
                tracing::debug!(datasets = split.len(), evicted, "the disk tier has new shares of datasets");
            }
            None => self.forget_applied(),
        }
    }

    /// Returns a split limited by the quotas of tenants, and remembers what they limited.
    pub fn within_quotas(&self, split: &Split, quotas: &[TenantQuota]) -> Split {
        let limited = apply_quotas(split.clone(), quotas);
        *self.quota_parts.lock() = quota_parts(split, &limited);
        limited
    }

    /// Returns the datasets that plain readers or warm-ups read, as of the last call of `next_split`.
    #[must_use]
    pub fn plain(&self) -> BTreeSet<DatasetId> {
        self.plain.lock().clone()
    }

    /// Has the disk divided anew soon, although nothing else was read.
    pub fn divide_anew(&self) {
        self.forget_applied();
        self.changed.notify_one();
    }

    /// Returns the dataset's share, if the quota of its tenant and not the disk is what limits it.
    #[must_use]
    pub fn share_by_quota(&self, disk: &DiskTier, dataset: DatasetId) -> Option<u64> {
        let part = *self.quota_parts.lock().get(&dataset)?;
        disk.share_of(dataset).filter(|&share| share == part)
    }

    /// Forgets which split was applied, so that the next call of `next_split` returns one.
    pub fn forget_applied(&self) {
        *self.applied.lock() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::Hash;

    /// A claim of `want` footprints, of `most` at most.
    fn claim(dataset: DatasetId, want: u64, most: u64) -> Claim {
        Claim::alone(dataset, Some(want), Some(most))
    }

    /// The versions of a test: all have the same sweep, 2, if any.
    fn ids(plain: DatasetId) -> VersionIds {
        VersionIds { plain, sweep: DatasetId(2) }
    }

    /// What a dataset without sweeps has on disk.
    fn uses(dataset: DatasetId, bytes: u64) -> QuotaUse {
        QuotaUse { dataset, plain: dataset, bytes }
    }

    /// The claims of a split without their pools.
    fn plain(split: Option<Split>) -> Option<Split> {
        let alone = |c: &Claim| Claim::alone(c.dataset, c.want, c.most);
        split.map(|split| split.iter().map(alone).collect())
    }

    /// A claim of all that the dataset can use.
    fn all(dataset: DatasetId, footprint: u64) -> Claim {
        claim(dataset, footprint, footprint)
    }

    /// A footprint of many small chunks.
    fn bytes(bytes: u64) -> Footprint {
        Footprint { bytes, chunks: 10_000 }
    }

    #[test]
    fn a_server_of_a_cluster_wants_the_part_that_it_owns_and_may_use_more() {
        let (s, set, sweep, root) = (Shares::default(), DatasetId(1), DatasetId(2), Root(Hash::of(b"r")));
        s.note(ids(set), root, bytes(100_000), ReaderKind::Warmup, 1);
        assert_eq!(split(&s, 2), Some(vec![all(set, 100_000)]));
        s.set_part(Part::new(1, 4));
        // A quarter, and 4 * sqrt(.25 * .75 / 10,000) = .0173.
        assert_eq!(split(&s, 3), Some(vec![claim(set, 26_732, 100_000)]));
        s.note(ids(set), root, bytes(100_000), ReaderKind::Sweep, 3);
        assert_eq!(split(&s, 4), Some(vec![claim(set, 26_732, 100_000), all(sweep, 100_000)]));
        s.set_part(Part::new(1, 4));
        assert_eq!(split(&s, 5), None);
        let few = Footprint { bytes: 1000, chunks: 1 };
        assert_eq!(
            (Part::new(1, 2).of(few), Part::new(0, 9).of(few), Part::new(9, 9).of(few)),
            (1000, 1000, 1000)
        );
        assert_eq!((Part::new(1, 4).of_bytes(1000), Part::ALL.of_bytes(7)), (250, 7));
    }

    fn split(s: &Shares, now_ns: u64) -> Option<Split> {
        plain(s.changed_split(&HashMap::new(), now_ns))
    }

    #[test]
    fn a_tenants_datasets_divide_its_quota() {
        let d = DatasetId;
        let greedy = Claim::alone(d(2), None, None);
        let split = vec![all(d(1), 100), greedy, all(d(9), 500)];
        let bounds = [(90, vec![uses(d(1), 5), uses(d(2), 80), uses(d(3), 40)])];
        let want = vec![all(d(1), 30), all(d(2), 30), all(d(3), 30), all(d(9), 500)];
        let limited = |quotas: &[TenantQuota]| plain(Some(apply_quotas(split.clone(), quotas)));
        assert_eq!(limited(&bounds), Some(want), "an idle dataset counts, too");
        let one = limited(&[(90, vec![uses(d(1), 5), uses(d(4), 0)])]);
        assert_eq!(one.and_then(|claims| claims.first().copied()), Some(all(d(1), 90)));
        assert_eq!(apply_quotas(split.clone(), &[]), split);
        let parts = quota_parts(&split, &apply_quotas(split.clone(), &bounds));
        assert_eq!(parts, BTreeMap::from([(d(1), 30), (d(2), 30)]), "an idle dataset asks for no more");
        let wide = [(1000, vec![uses(d(1), 5), uses(d(9), 0)])];
        assert!(quota_parts(&split, &apply_quotas(split.clone(), &wide)).is_empty(), "the quota is no limit");
        // What one dataset does not want is for the other, and comes back when the first wants it.
        let split = vec![claim(d(1), 10, 500), all(d(2), 300)];
        let bounds = [(90, vec![uses(d(1), 0), uses(d(2), 0)])];
        let limited = plain(Some(apply_quotas(split, &bounds)));
        assert_eq!(limited, Some(vec![all(d(1), 10), all(d(2), 80)]));
    }

    #[test]
    fn plain_readers_want_what_they_asked_for() {
        let (s, set, sweep, root) = (Shares::default(), DatasetId(1), DatasetId(2), Root(Hash::of(b"r")));
        s.note(ids(set), root, bytes(1000), ReaderKind::Sweep, 1);
        s.note(ids(set), root, bytes(1000), ReaderKind::Plain, 1);
        let claims = |want| Some(vec![claim(set, want, 1000), all(sweep, 1000)]);
        let after = |demand: u64| plain(s.changed_split(&HashMap::from([(set, demand)]), 2));
        assert_eq!(split(&s, 2), claims(0), "nothing was asked for yet");
        assert_eq!(after(8), claims(8), "one file");
        assert_eq!(after(8), None, "which it has now");
        assert_eq!(after(9), claims(9));
        assert_eq!(after(80), claims(80));
        assert_eq!(after(81), claims(90), "it grows by an eighth at least");
        assert_eq!(after(10), None, "it does not fall while the dataset is read");
        assert_eq!(after(5000), claims(1000), "it cannot use more");
        s.note(ids(set), root, bytes(1000), ReaderKind::Sweep, HOUR);
        assert_eq!(split(&s, HOUR + 2), Some(vec![all(sweep, 1000)]), "idle for an hour");
        s.note(ids(set), root, bytes(1000), ReaderKind::Plain, HOUR + 3);
        assert_eq!(split(&s, HOUR + 4), claims(0), "it begins anew");
        s.note(ids(set), root, bytes(1000), ReaderKind::Warmup, HOUR + 5);
        assert_eq!(split(&s, HOUR + 6), claims(1000), "a warm-up reads all of it");
    }

    const HOUR: u64 = 3_600_000_000_000;

    #[test]
    fn a_disk_that_holds_more_is_divided_again_and_one_that_holds_a_little_less_is_not() {
        assert!(
            capacity_changed(0, 1)
                && capacity_changed(1_000_000, 1_001_001)
                && capacity_changed(1_000_000, 979_999)
        );
        assert!(
            !capacity_changed(0, 0)
                && !capacity_changed(1_000_000, 1_001_000)
                && !capacity_changed(1_000_000, 980_000)
        );
        // There and back again, as with records whose mean length swings about a bound: once.
        assert!(capacity_changed(980_000, 1_000_000) && !capacity_changed(1_000_000, 980_000));
    }

    #[test]
    fn datasets_come_with_their_first_read_and_go_an_hour_after_their_last() {
        let s = Shares::default();
        let (a, b, root) = (DatasetId(1), DatasetId(2), |n: u8| Root(Hash::of(&[n])));
        assert_eq!(split(&s, 0), Some(vec![]));
        s.note(ids(a), root(1), bytes(100), ReaderKind::Plain, 5);
        assert_eq!(split(&s, 6), Some(vec![claim(a, 0, 100)]));
        s.note(ids(a), root(1), bytes(100), ReaderKind::Ordered, 7);
        assert_eq!(split(&s, 8), None, "nothing new");
        // Another version of it, and another dataset.
        s.note(ids(a), root(2), bytes(50), ReaderKind::Plain, 10);
        s.note(ids(b), root(3), bytes(7), ReaderKind::Ordered, HOUR);
        assert_eq!(split(&s, HOUR), Some(vec![claim(a, 0, 150), all(b, 7)]));
        assert_eq!(split(&s, HOUR + 8), Some(vec![claim(a, 0, 50), all(b, 7)]), "one version is idle");
        assert_eq!(split(&s, HOUR + 10), Some(vec![all(b, 7)]));
        // A clock that steps back forgets nobody.
        s.note(ids(b), root(3), bytes(7), ReaderKind::Plain, 3);
        assert_eq!(split(&s, 1), None);
        s.forget_applied();
        assert_eq!(split(&s, 1), Some(vec![all(b, 7)]));
    }

    #[test]
    fn an_order_over_what_a_sweep_keeps_has_no_share_of_its_own_until_somebody_else_reads() {
        let s = Shares::default();
        let (set, sweep, other) = (DatasetId(1), DatasetId(2), DatasetId(3));
        let root = Root(Hash::of(b"r"));
        s.note(ids(set), root, bytes(100), ReaderKind::Ordered, 1);
        s.note(ids(other), root, bytes(30), ReaderKind::Ordered, 1);
        assert_eq!(split(&s, 2), Some(vec![all(set, 100), all(other, 30)]), "alone they have shares");
        s.note(ids(set), root, bytes(100), ReaderKind::Sweep, 3);
        assert_eq!(split(&s, 4), Some(vec![all(sweep, 100), all(other, 30)]), "of another domain");
        // Somebody reads the mount: a floor for as long as that is not idle.
        s.note(ids(set), root, bytes(100), ReaderKind::Plain, 5);
        let each = vec![claim(set, 0, 100), all(sweep, 100), all(other, 30)];
        assert_eq!(split(&s, 6), Some(each));
        for (id, by) in [(set, ReaderKind::Ordered), (set, ReaderKind::Sweep), (other, ReaderKind::Ordered)] {
            s.note(ids(id), root, bytes(100), by, HOUR);
        }
        assert_eq!(split(&s, HOUR + 6), Some(vec![all(sweep, 100), all(other, 30)]));
        // Nor does a sweep stand for another version of the dataset.
        let newer = Root(Hash::of(b"s"));
        s.note(ids(set), newer, bytes(40), ReaderKind::Ordered, HOUR);
        assert_eq!(split(&s, HOUR + 7), Some(vec![all(set, 40), all(sweep, 100), all(other, 30)]));
        // The sweep has ended.
        s.note(ids(set), root, bytes(100), ReaderKind::Ordered, 2 * HOUR);
        assert_eq!(split(&s, 2 * HOUR + 1), Some(vec![all(set, 100)]));
    }

    /// I4: a dataset and its sweep claim no more together than the chunks of its versions need.
    #[test]
    fn a_sweep_and_its_plain_readers_are_one_pool() {
        let (s, set, other) = (Shares::default(), DatasetId(1), DatasetId(9));
        let root = |n: u8| Root(Hash::of(&[n]));
        s.note(ids(set), root(1), bytes(100), ReaderKind::Warmup, 1);
        s.note(ids(set), root(1), bytes(90), ReaderKind::Sweep, 1);
        let unlike = VersionIds { plain: set, sweep: DatasetId(3) };
        s.note(unlike, root(2), bytes(7), ReaderKind::Plain, 1);
        s.note(VersionIds { plain: other, sweep: DatasetId(4) }, root(3), bytes(500), ReaderKind::Ordered, 1);
        let split = s.changed_split(&HashMap::new(), 2).expect("a split");
        let pools: Vec<_> = split.iter().map(|c| (c.dataset, c.pool.plain, c.pool.most)).collect();
        let sweep = DatasetId(2);
        assert_eq!(pools, [(set, set, Some(107)), (sweep, set, Some(107)), (other, other, Some(500))]);
        let shares: BTreeMap<_, _> = split_by_claims(300, &split).into_iter().collect();
        assert_eq!((shares[&set] + shares[&sweep], shares[&other]), (107, 193));
    }
}
