//! The view that a server has of its cluster: an immutable value, which a newer one replaces.

use super::{
    peers::PeerAddress,
    records::{MemberPhase, MemberRecord, PEER_PROTOCOL, Snapshot},
};
use fletch_api::{Cluster, Member, MemberState, cluster::VIEW_ALONE};
use fletch_core::{
    MemberId, StoreKey,
    cluster::{Ring, RingMember, View, Weight},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A view, and what the members say of themselves.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(from = "AtRest", into = "AtRest")]
pub struct ClusterView {
    /// The ring, its number, and which members are up.
    pub core: View,
    records: BTreeMap<MemberId, MemberRecord>,
}

/// A view in a file.
#[derive(Serialize, Deserialize)]
struct AtRest {
    number: u64,
    ring: Ring,
    members: BTreeMap<MemberId, MemberRecord>,
}

impl From<AtRest> for ClusterView {
    fn from(rest: AtRest) -> Self {
        ClusterView::new(rest.number, rest.ring, rest.members)
    }
}

impl From<ClusterView> for AtRest {
    fn from(view: ClusterView) -> Self {
        AtRest { number: view.core.number(), ring: view.core.ring().clone(), members: view.records }
    }
}

impl From<&Snapshot> for ClusterView {
    fn from(snapshot: &Snapshot) -> Self {
        let records = snapshot.members.iter().map(|(id, m)| (id.clone(), m.value.clone()));
        ClusterView::new(snapshot.ring.revision, snapshot.ring.value.clone(), records.collect())
    }
}

impl ClusterView {
    fn new(number: u64, ring: Ring, records: BTreeMap<MemberId, MemberRecord>) -> Self {
        let up = records.iter().filter(|(_, r)| r.phase == MemberPhase::Up).map(|(id, _)| id.clone());
        ClusterView { core: View::new(number, ring, up.collect()), records }
    }

    /// Returns the view of a server that is alone.
    #[must_use]
    pub fn single(id: MemberId, url: String) -> Self {
        let member = RingMember { id: id.clone(), url, weight: 1, zone: None };
        let ring = Ring::default().joined(&member, Weight::Exact(1), true).unwrap_or_default();
        ClusterView { core: View::new(VIEW_ALONE, ring, [id].into()), records: BTreeMap::new() }
    }

    /// Returns the view of a server that waits for its coordinator: it alone is up, and owns nothing.
    #[must_use]
    pub fn waiting(id: MemberId, record: MemberRecord) -> Self {
        ClusterView::new(0, Ring::default(), [(id, record)].into())
    }

    /// Returns the view with one more member up: the server that starts from it.
    #[must_use]
    pub fn with_own(&self, id: &MemberId, record: MemberRecord) -> Self {
        let mut records = self.records.clone();
        records.insert(id.clone(), record);
        ClusterView::new(self.core.number(), self.core.ring().clone(), records)
    }

    /// Returns the members of the ring, and those that are up beside it.
    pub fn members(&self) -> impl Iterator<Item = &MemberId> {
        let outside = self.core.up().iter().filter(|id| self.core.ring().get(id).is_none());
        self.core.ring().members().iter().map(|m| &m.id).chain(outside)
    }

    /// Returns a member and the URL by which other servers reach it, if the member is up and speaks the
    /// protocol of this build.
    #[must_use]
    pub fn address(&self, id: &MemberId) -> Option<PeerAddress> {
        let understands = |r: &&MemberRecord| r.peer_protocol == PEER_PROTOCOL;
        let record = self.records.get(id).filter(|_| self.core.is_up(id)).filter(understands)?;
        let url = record.peer_url.as_ref().unwrap_or(&record.url).clone();
        Some(PeerAddress { id: id.clone(), url })
    }

    /// Returns whether a member that is up asks for tokens, if that is known.
    #[must_use]
    pub fn needs_token(&self, id: &MemberId) -> Option<bool> {
        self.records.get(id).filter(|_| self.core.is_up(id))?.needs_token
    }

    /// Returns the URL by which other servers reached a member last, whether it is up or not.
    #[must_use]
    pub fn last_address(&self, id: &MemberId) -> Option<PeerAddress> {
        let record = self.records.get(id);
        let of_record = record.map(|r| r.peer_url.as_ref().unwrap_or(&r.url).clone());
        let url = of_record.or_else(|| Some(self.core.ring().get(id)?.url.clone()))?;
        Some(PeerAddress { id: id.clone(), url })
    }

    /// Returns the URL by which clients reach a member, if it is up with this state directory.
    #[must_use]
    pub fn url_of(&self, id: &MemberId, incarnation: &str) -> Option<&str> {
        let record = self.records.get(id).filter(|r| r.incarnation == incarnation)?;
        self.core.is_up(id).then_some(record.url.as_str())
    }

    /// Returns the incarnation of a member that is up.
    #[must_use]
    pub fn incarnation_of(&self, id: &MemberId) -> Option<&str> {
        self.records.get(id).filter(|_| self.core.is_up(id)).map(|record| record.incarnation.as_str())
    }

    /// Returns whether a member with this state directory has no key: it is neither up nor restarting.
    #[must_use]
    pub fn is_gone(&self, id: &MemberId, incarnation: &str) -> bool {
        self.records.get(id).is_none_or(|r| r.incarnation != incarnation)
    }

    /// Returns whether a member of that name has no key, with whatever state directory.
    #[must_use]
    pub fn is_absent(&self, id: &MemberId) -> bool {
        !self.records.contains_key(id)
    }

    /// Returns the member that is first in a ranking among those that are up, with its URL for clients. Where
    /// no member has a weight, the first one of the ring.
    #[must_use]
    pub fn first_for(&self, key: &StoreKey) -> Option<(&MemberId, &str)> {
        let ring = self.core.ring().members();
        let first = self.core.owner(key).or_else(|| ring.iter().find(|m| self.core.is_up(&m.id)))?;
        self.records.get(&first.id).map(|record| (&first.id, record.url.as_str()))
    }

    /// Returns the state of a member.
    #[must_use]
    pub fn state(&self, id: &MemberId) -> MemberState {
        let phase = self.records.get(id).map(|r| r.phase);
        match (self.core.is_up(id), phase) {
            (true, _) if self.core.ring().drained().contains(id) => MemberState::Drained,
            (true, _) => MemberState::Up,
            (false, Some(MemberPhase::Restarting)) => MemberState::Restarting,
            (false, _) => MemberState::Down,
        }
    }

    /// Returns the number of members in each state, in the ring or outside.
    #[must_use]
    pub fn states(&self) -> BTreeMap<&'static str, u64> {
        let mut states: BTreeMap<_, _> = MemberState::ALL.iter().map(|s| (s.as_str(), 0)).collect();
        for member in self.to_api().members {
            *states.entry(member.state.unwrap_or_default().as_str()).or_default() += 1;
        }
        states
    }

    /// Returns what a client gets: the members of the ring, and those that are up outside, with weight 0.
    #[must_use]
    pub fn to_api(&self) -> Cluster {
        let ring = self.core.ring();
        let mut members: Vec<Member> = ring.members().iter().map(|m| self.member(m)).collect();
        let outside = self.records.iter().filter(|(id, _)| ring.get(id).is_none() && self.core.is_up(id));
        members.extend(outside.map(|(id, record)| {
            let (id, url) = (id.clone(), record.url.clone());
            self.member(&RingMember { id, url, weight: 0, zone: record.zone.clone() })
        }));
        Cluster { view: self.core.number(), domain: None, members }
    }

    fn member(&self, m: &RingMember) -> Member {
        Member {
            id: m.id.to_string(),
            url: m.url.clone(),
            weight: m.weight,
            zone: m.zone.clone(),
            up: self.core.is_up(&m.id),
            state: Some(self.state(&m.id)),
        }
    }

    /// Returns the entity tag of the view. It changes with the ring, and with what its members do.
    #[must_use]
    pub fn etag(&self) -> String {
        let text = serde_json::to_vec(&self.to_api()).unwrap_or_default();
        format!("\"{}-{}\"", self.core.number(), fletch_core::Hash::of(&text).short())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(s: &str) -> MemberId {
        MemberId::new(s).expect("a name")
    }

    fn record(phase: MemberPhase) -> MemberRecord {
        MemberRecord {
            incarnation: "1".into(),
            url: "http://a".into(),
            peer_url: None,
            zone: None,
            build: "0".into(),
            peer_protocol: PEER_PROTOCOL,
            phase,
            process: String::new(),
            place: String::new(),
            needs_token: None,
        }
    }

    #[test]
    fn a_single_server_looks_as_before_with_more_fields() {
        let view = ClusterView::single(id("h"), "http://127.0.0.1:1".into());
        let text = serde_json::to_string(&view.to_api()).expect("JSON");
        let (old, new) =
            (r#"{"view":1,"members":[{"id":"h","url":"http://127.0.0.1:1","weight":1"#, r#","up":true"#);
        assert!(text.starts_with(old) && text.contains(new), "{text}");
    }

    #[test]
    fn a_view_is_kept_whole_and_its_tag_follows_the_members() {
        let ring = ["a", "b", "c"].iter().fold(Ring::default(), |ring, name| {
            let member = RingMember { id: id(name), url: "u".into(), weight: 0, zone: None };
            ring.joined(&member, Weight::Exact(9), true).expect("a change")
        });
        let records = [("a", MemberPhase::Up), ("b", MemberPhase::Restarting), ("d", MemberPhase::Up)];
        let records = records.into_iter().map(|(name, phase)| (id(name), record(phase))).collect();
        let view = ClusterView::new(12, ring, records);
        let told: Vec<_> = view
            .to_api()
            .members
            .into_iter()
            .map(|m| (m.id, m.weight, m.up, m.state.expect("new")))
            .collect();
        assert_eq!(
            told,
            [
                ("a".to_owned(), 9, true, MemberState::Up),
                ("b".to_owned(), 9, false, MemberState::Restarting),
                ("c".to_owned(), 9, false, MemberState::Down),
                ("d".to_owned(), 0, true, MemberState::Up),
            ]
        );
        let text = super::super::records::to_text(&view);
        let again: ClusterView = super::super::records::from_text(&text).expect("a view");
        assert_eq!((&again, again.etag()), (&view, view.etag()));
        let peer_url = Some("http://peer".to_owned());
        let view = view.with_own(&id("d"), MemberRecord { peer_url, ..record(MemberPhase::Up) });
        let urls = ["a", "b", "c", "d"].map(|name| view.address(&id(name)).map(|to| to.url));
        assert_eq!(urls, [Some("http://a".to_owned()), None, None, Some("http://peer".to_owned())]);
        let newer = MemberRecord { peer_protocol: PEER_PROTOCOL + 1, ..record(MemberPhase::Up) };
        assert_eq!(view.with_own(&id("a"), newer).address(&id("a")), None, "it would misread what is asked");
        let other = view.with_own(&id("c"), record(MemberPhase::Up));
        assert_eq!(other.core.number(), view.core.number());
        assert_ne!(other.etag(), view.etag());
        assert_eq!((view.states()["up"], view.states()["down"]), (2, 1));
    }
}
