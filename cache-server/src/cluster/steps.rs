//! Decides what a member writes next, from one snapshot of the cluster's keys to one step.
//!
//! ```text
//! no key `cluster` ─▶ Create      no own lease ─▶ Grant      own record absent or old ─▶ Put
//! own member not in the ring ─▶ ChangeRing    others silent for too long ─▶ ChangeRing    else ─▶ Settled
//! ```
//! I1. Every write compares the revision that the snapshot showed. A lost race writes nothing, and the next
//!     snapshot decides anew. So a step can be tried again without harm.
//! I2. A member never takes the key of a member that is up with another incarnation.
//! I3. Of two processes with copies of one state directory, the one that is up keeps the key. The other one
//!     writes nothing.
//! I4. A server that joined before writes nothing into a cluster with another uid, or without one.

use super::records::{ClusterRecord, MemberPhase, MemberRecord, Snapshot};
use fletch_core::{
    MemberId,
    cluster::{MEMBERS_MAX, Ring, RingMember, Weight},
};

/// What a member is, and what it wants in the ring.
#[derive(Debug, Clone)]
pub struct OwnMember {
    /// Its name.
    pub id: MemberId,
    /// The uid of the cluster that it joined.
    pub uid: Option<String>,
    /// What it says of itself.
    pub record: MemberRecord,
    /// The weight that it wants.
    pub weight: Weight,
    /// Whether it has not been in the ring since it started.
    pub starts: bool,
}

impl OwnMember {
    fn ring_member(&self) -> RingMember {
        let MemberRecord { url, zone, .. } = self.record.clone();
        RingMember { id: self.id.clone(), url, weight: 0, zone }
    }
}

/// The next write.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Create the cluster.
    Create,
    /// Get a lease.
    Grant,
    /// Write the own record under the lease, if its revision is this one.
    Put(u64),
    /// Write a ring, if its revision is this one.
    ChangeRing(u64, Ring),
    /// Nothing is to be written.
    Settled,
}

/// Why a member may not be part of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The keys of the cluster are gone.
    #[error(
        "this server has joined the cluster with the uid {0}, and etcd has no such cluster now; check \
         cluster.endpoints and cluster.name, restore etcd from a backup, or write back what the servers \
         know: `fletch cluster recover`"
    )]
    Emptied(String),
    /// The cluster of this name is another one.
    #[error(
        "this server has joined the cluster with the uid {known}, and etcd has one with the uid {found}; \
         check cluster.endpoints and cluster.name, or start with an empty --state-dir"
    )]
    OtherCluster {
        /// The one that it joined.
        known: String,
        /// The one that is there.
        found: String,
    },
    /// Another server has the name.
    #[error(
        "another server is up as {id} at {url}; give this one another cluster.id. If that server is dead, \
         wait for cluster.member_ttl and start again"
    )]
    IdInUse {
        /// The name.
        id: MemberId,
        /// The URL of the other server.
        url: String,
    },
    /// Another process has a copy of the state directory.
    #[error(
        "another server is up as {id} at {url} with a copy of this state directory; end one of the two, and \
         give a cloned server an empty --state-dir and its own cluster.id. If the other one is dead, wait \
         for cluster.member_ttl and start again"
    )]
    StateInUse {
        /// The name.
        id: MemberId,
        /// The URL of the other server.
        url: String,
    },
    /// The cluster has no room.
    #[error("the cluster has {MEMBERS_MAX} members, which is the limit; drain one and stop it")]
    Full,
}

/// Returns the next write of a member. `silent`: the members that lose their chunks.
///
/// # Errors
/// [`Refusal`], after which the member writes nothing.
pub fn next_step(
    own: &OwnMember,
    snapshot: &Snapshot,
    lease: Option<(i64, u64)>,
    silent: &[MemberId],
) -> Result<Step, Refusal> {
    match (&own.uid, &snapshot.cluster) {
        (None, None) => return Ok(Step::Create),
        (Some(known), None) => return Err(Refusal::Emptied(known.clone())),
        (Some(known), Some(ClusterRecord { uid })) if known != uid => {
            return Err(Refusal::OtherCluster { known: known.clone(), found: uid.clone() });
        }
        _ => {}
    }
    let here = snapshot.members.get(&own.id);
    if let Some(other) = here
        .filter(|m| m.value.incarnation != own.record.incarnation && m.value.phase != MemberPhase::Restarting)
    {
        return Err(Refusal::IdInUse { id: own.id.clone(), url: other.value.url.clone() });
    }
    if let Some(twin) = here.filter(|m| m.value.is_twin_of(&own.record)) {
        // A process of the very same directory held its lock before, so it has ended.
        let has_ended = !own.record.place.is_empty() && twin.value.place == own.record.place;
        let has_joined = lease.is_some_and(|(_, put_at)| put_at > 0);
        if has_joined || !has_ended {
            return Err(Refusal::StateInUse { id: own.id.clone(), url: twin.value.url.clone() });
        }
    }
    // The revision that this lease's put had: a record of the same text can be of an earlier lease.
    let Some((_, put_at)) = lease else { return Ok(Step::Grant) };
    if here.is_none_or(|m| m.value != own.record || m.revision != put_at) {
        return Ok(Step::Put(here.map_or(0, |m| m.revision)));
    }
    let ring = &snapshot.ring.value;
    let revision = snapshot.ring.revision;
    if let Some(next) = ring.joined(&own.ring_member(), own.weight, own.starts) {
        if next.members().len() > MEMBERS_MAX {
            return Err(Refusal::Full);
        }
        return Ok(Step::ChangeRing(revision, next));
    }
    let others: Vec<MemberId> = silent.iter().filter(|id| **id != own.id).cloned().collect();
    Ok(ring.without(&others).map_or(Step::Settled, |next| Step::ChangeRing(revision, next)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::records::{Keyed, PEER_PROTOCOL};
    use proptest::prelude::*;

    fn id(i: usize) -> MemberId {
        MemberId::new(&format!("srv-{i}")).expect("a name")
    }

    fn own(i: usize) -> OwnMember {
        OwnMember {
            id: id(i),
            uid: None,
            record: MemberRecord {
                incarnation: format!("inc-{i}"),
                url: format!("http://{i}"),
                peer_url: None,
                zone: None,
                build: "0".into(),
                peer_protocol: PEER_PROTOCOL,
                phase: MemberPhase::Up,
                process: format!("process-{i}"),
                place: format!("place-{i}"),
                needs_token: None,
            },
            weight: Weight::About(100),
            starts: true,
        }
    }

    /// A server of the model: what it wants, its lease, and whether it runs.
    struct Server {
        own: OwnMember,
        lease: Option<(i64, u64)>,
        runs: bool,
    }

    /// etcd of the model: executes a step whose comparison holds.
    fn execute(etcd: &mut Snapshot, revision: &mut u64, server: &mut Server, step: Step) {
        *revision += 1;
        match step {
            Step::Create => {
                etcd.cluster.get_or_insert(ClusterRecord { uid: format!("u{revision}") });
            }
            Step::Grant => server.lease = Some((1, 0)),
            Step::Put(seen) => {
                if etcd.members.get(&server.own.id).map_or(0, |m| m.revision) == seen {
                    let kept = Keyed { revision: *revision, value: server.own.record.clone() };
                    etcd.members.insert(server.own.id.clone(), kept);
                    server.lease = Some((1, *revision));
                }
            }
            Step::ChangeRing(seen, ring) => {
                if etcd.ring.revision == seen {
                    etcd.ring = Keyed { revision: *revision, value: ring };
                }
            }
            Step::Settled => {
                server.own.uid = etcd.cluster.as_ref().map(|c| c.uid.clone());
                server.own.starts = false;
            }
        }
    }

    proptest! {
        /// Servers start, stop, lose leases and race with old snapshots. Whatever happens, they settle with
        /// every running server in the ring once, except for drained ones; and settled servers write nothing.
        #[test]
        fn all_settle_on_one_ring(
            events in proptest::collection::vec((0usize..4, 0u8..8), 0..80),
        ) {
            let mut etcd = Snapshot::default();
            let mut revision = 0;
            let mut servers: Vec<Server> =
                (0..4).map(|i| Server { own: own(i), lease: None, runs: true }).collect();
            let mut old = etcd.clone();
            for (i, what) in events {
                match what {
                    0 => { servers[i].runs = false; servers[i].lease = None; etcd.members.remove(&id(i)); }
                    1 => { servers[i].runs = true; servers[i].own.starts = true; }
                    2 => servers[i].lease = None,
                    3 => if let Some(ring) = etcd.ring.value.with_drained(&id(i)) {
                        revision += 1;
                        etcd.ring = Keyed { revision, value: ring };
                    },
                    4 => old = etcd.clone(),
                    _ if !servers[i].runs => {}
                    _ => {
                        // From an old snapshot: every comparison that matters fails, or still holds.
                        let seen = if what == 5 { old.clone() } else { etcd.clone() };
                        let server = &mut servers[i];
                        let step = next_step(&server.own, &seen, server.lease, &[]);
                        if let Ok(step) = step {
                            execute(&mut etcd, &mut revision, server, step);
                        }
                    }
                }
            }
            let gone: Vec<MemberId> = (0..4).filter(|i| !servers[*i].runs).map(id).collect();
            for _ in 0..20 {
                for server in servers.iter_mut().filter(|s| s.runs) {
                    let step = next_step(&server.own, &etcd, server.lease, &gone).expect("nobody refuses");
                    execute(&mut etcd, &mut revision, server, step);
                }
            }
            let ring = etcd.ring.clone();
            for server in servers.iter().filter(|s| s.runs) {
                prop_assert_eq!(next_step(&server.own, &etcd, server.lease, &gone), Ok(Step::Settled));
                let is_drained = ring.value.drained().contains(&server.own.id);
                prop_assert_eq!(ring.value.get(&server.own.id).is_some(), !is_drained);
            }
            if servers.iter().any(|s| s.runs) {
                prop_assert!(gone.iter().all(|id| ring.value.get(id).is_none()));
            }
        }
    }

    #[test]
    fn a_copy_of_the_state_directory_is_refused_while_the_other_one_is_up() {
        let cluster = Some(ClusterRecord { uid: "u".into() });
        let mut etcd = Snapshot { cluster, ..Snapshot::default() };
        let mut first = own(1).record;
        first.process = "first".into();
        etcd.members.insert(id(1), Keyed { revision: 7, value: first.clone() });
        let restarted = own(1);
        assert_eq!(next_step(&restarted, &etcd, Some((1, 0)), &[]), Ok(Step::Put(7)), "the same directory");
        let mut copy = own(1);
        copy.record.place = "elsewhere".into();
        let refused = next_step(&copy, &etcd, None, &[]).expect_err("a copy");
        assert!(matches!(refused, Refusal::StateInUse { .. }), "{refused}");
        let refused = next_step(&restarted, &etcd, Some((1, 5)), &[]).expect_err("its key was taken");
        assert!(matches!(refused, Refusal::StateInUse { .. }), "{refused}");
        first.phase = MemberPhase::Restarting;
        etcd.members.insert(id(1), Keyed { revision: 8, value: first });
        assert_eq!(next_step(&copy, &etcd, Some((1, 0)), &[]), Ok(Step::Put(8)), "the other one stopped");
        etcd.members.clear();
        assert_eq!(next_step(&copy, &etcd, Some((1, 0)), &[]), Ok(Step::Put(0)), "the other one is down");
    }

    #[test]
    fn another_incarnation_and_another_cluster_are_refused() {
        let mut etcd = Snapshot::default();
        let joined = OwnMember { uid: Some("u1".into()), ..own(1) };
        assert_eq!(next_step(&joined, &etcd, None, &[]), Err(Refusal::Emptied("u1".into())));
        etcd.cluster = Some(ClusterRecord { uid: "u2".into() });
        let refused = next_step(&joined, &etcd, None, &[]).expect_err("another");
        assert!(refused.to_string().contains("u1") && refused.to_string().contains("u2"));
        let mut other = own(1).record;
        other.incarnation = "other".into();
        etcd.members.insert(id(1), Keyed { revision: 7, value: other.clone() });
        let refused = next_step(&own(1), &etcd, None, &[]).expect_err("up").to_string();
        assert!(refused.contains("srv-1 at http://1") && refused.contains("cluster.id"), "{refused}");
        // A server that stopped in good order left its name.
        other.phase = MemberPhase::Restarting;
        etcd.members.insert(id(1), Keyed { revision: 7, value: other });
        assert_eq!(next_step(&own(1), &etcd, None, &[]), Ok(Step::Grant));
        assert_eq!(next_step(&own(1), &etcd, Some((1, 0)), &[]), Ok(Step::Put(7)));
    }
}
