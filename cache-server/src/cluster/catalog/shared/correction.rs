//! Writes datasets back of which etcd has an earlier state, because a backup of it was restored.
//!
//! ```text
//! load: etcd is behind ─▶ claim ─▶ wait ─▶ the latest claim ─▶ `position` says so ─▶ changes ─▶ new position
//!                                       └▶ the others wait, and load what that server wrote
//! ```
//! I1. The server with the latest position among those that claim writes its datasets, and no other one does:
//!     each transaction compares the record of the position.
//! I2. The new position is later than all that servers know. So a server that comes back afterwards loads
//!     what is there: changes since the restore stay.
//! I3. While a correction is under way, or was cut off, no server that has datasets of the cluster replaces
//!     them by those of etcd.

use super::{
    Catalog, CatalogError, DataKey, PositionRecord, Shared, TenantRecord, dataset_key, dataset_text,
    parse_key, position_key, read_dataset, read_position, tenant_key,
};
use crate::cluster::{KeyValue, Op, Page, catalog::records::ClaimRecord, from_text, to_text};
use fletch_core::MemberId;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// How long a server waits for the claims of others.
const CLAIM_WAIT: Duration = Duration::from_secs(2);
/// After so long, a server writes although another one has the latest claim: that one is gone.
const CLAIM_ENDS: Duration = Duration::from_secs(8);
/// How far a new position is from all that servers know.
const POSITIONS_APART: u64 = 1 << 32;

/// What makes the datasets of etcd those of a server.
struct Changes {
    /// Each with the revision that its key must have, if that matters.
    ops: Vec<(Op, Option<u64>)>,
    registered: usize,
    unregistered: usize,
}

impl Shared {
    /// Returns the record of the position of an etcd, and the position of its datasets.
    fn position_in(&self, there: &[KeyValue]) -> Result<(PositionRecord, u64), CatalogError> {
        let key = position_key(&self.of.keys);
        let found = there.iter().find(|kv| kv.key == key.as_bytes());
        let record = found.map(read_position).transpose()?.unwrap_or_default();
        let last = there.iter().map(|kv| kv.mod_revision).max().unwrap_or(0);
        Ok((record, last.saturating_add(record.offset)))
    }

    /// Returns whether this server knows changes that etcd does not have, or may lack, because another server
    /// began to write its datasets back.
    ///
    /// # Errors
    /// [`CatalogError::Record`].
    pub(super) fn is_ahead_of(&self, uid: &str, there: &[KeyValue]) -> Result<bool, CatalogError> {
        let own = self.position.of(uid);
        let (record, position) = self.position_in(there)?;
        let is_ahead = record.correcting.is_some() || own > position;
        if !is_ahead {
            *self.claims_since.lock() = None;
        }
        Ok(is_ahead)
    }

    /// Returns the record that makes the position later than all that servers know. `revision`: that of etcd.
    pub(super) fn position_after(&self, uid: &str, revision: u64) -> PositionRecord {
        let next = self.position.of(uid).saturating_add(POSITIONS_APART);
        PositionRecord { offset: next.saturating_sub(revision), correcting: None }
    }

    /// Writes the datasets of this server to an etcd that is behind, if no other server knows later ones.
    ///
    /// # Errors
    /// [`CatalogError::WentBack`]: not yet, or another server does so.
    pub(super) async fn correct(
        &self,
        catalog: &Catalog,
        (uid, cluster): (&str, u64),
        page: &Page,
    ) -> Result<(), CatalogError> {
        let own = self.position.of(uid);
        let claims = self.of.etcd.read_prefix(&self.of.keys.claims()).await?.keys;
        let me = format!("{}{}", self.of.keys.claims(), self.cluster.own_id());
        let since = *self.claims_since.lock();
        let (Some(since), true) = (since, claims.iter().any(|kv| kv.key == me.as_bytes())) else {
            *self.claims_since.lock() = Some(Instant::now());
            self.cluster.note_history_loss();
            tracing::warn!(
                "etcd has the datasets of a backup, and this server knows later changes; the server that \
                 knows the latest one writes them back"
            );
            let put = Op::Put { key: me, value: to_text(&ClaimRecord { position: own }), lease: 0 };
            self.of.etcd.transact(&[(self.of.keys.cluster(), cluster)], &[put]).await?;
            return Err(CatalogError::WentBack);
        };
        let latest = claims.iter().filter_map(|kv| Some((self.claim_of(kv)?, kv)));
        let latest = latest.max_by(|a, b| a.0.cmp(&b.0));
        let is_mine = latest.is_none_or(|(_, kv)| kv.key == me.as_bytes());
        if since.elapsed() < CLAIM_WAIT || !is_mine && since.elapsed() < CLAIM_ENDS {
            return Err(CatalogError::WentBack);
        }
        self.write_own(catalog, (uid, cluster), (page, claims)).await?;
        *self.claims_since.lock() = None;
        Ok(())
    }

    /// Returns the position and the member of a claim.
    fn claim_of(&self, kv: &KeyValue) -> Option<(u64, MemberId)> {
        let id = kv.key.strip_prefix(self.of.keys.claims().as_bytes())?;
        let claim: ClaimRecord = from_text(&kv.value).ok()?;
        Some((claim.position, MemberId::new(&String::from_utf8_lossy(id)).ok()?))
    }

    async fn write_own(
        &self,
        catalog: &Catalog,
        (uid, cluster): (&str, u64),
        (page, claims): (&Page, Vec<KeyValue>),
    ) -> Result<(), CatalogError> {
        let keys = &self.of.keys;
        let put = |key, value| Op::Put { key, value, lease: 0 };
        let key = position_key(keys);
        let seen = page.keys.iter().find(|kv| kv.key == key.as_bytes()).map_or(0, |kv| kv.mod_revision);
        let (now, _) = self.position_in(&page.keys)?;
        let begun = PositionRecord { correcting: Some(self.position.of(uid)), ..now };
        let compare = [(keys.cluster(), cluster), (key.clone(), seen)];
        let begun = self.of.etcd.transact(&compare, &[put(key.clone(), to_text(&begun))]).await?;
        if !begun.succeeded {
            return Err(CatalogError::WentBack);
        }
        let Changes { ops, registered, unregistered } = self.changes(catalog, &page.keys)?;
        let conditions = [(keys.cluster(), cluster), (key.clone(), begun.revision)];
        if !self.of.write_all(&conditions, ops).await? {
            return Err(CatalogError::WentBack);
        }
        let mut ends = vec![put(key, to_text(&self.position_after(uid, begun.revision)))];
        let claims = claims.into_iter().map(|kv| String::from_utf8_lossy(&kv.key).into_owned());
        ends.extend(claims.map(|key| Op::Delete { key }));
        if !self.of.etcd.transact(&conditions, &ends).await?.succeeded {
            return Err(CatalogError::WentBack);
        }
        tracing::warn!(
            registered,
            unregistered,
            "etcd had the datasets of a backup; this server knew the latest change, and wrote its own back"
        );
        Ok(())
    }

    /// Returns what makes the datasets of etcd those of this server.
    fn changes(&self, catalog: &Catalog, there: &[KeyValue]) -> Result<Changes, CatalogError> {
        let keys = &self.of.keys;
        let mut found: BTreeMap<String, &KeyValue> = BTreeMap::new();
        let (mut changes, mut tenants) = (Vec::new(), BTreeMap::new());
        for kv in there {
            if let DataKey::Dataset(..) = parse_key(keys, &kv.key) {
                found.insert(String::from_utf8_lossy(&kv.key).into_owned(), kv);
            }
        }
        let mark = |key| (Op::Put { key, value: to_text(&TenantRecord {}), lease: 0 }, None);
        for own in catalog.local.all() {
            let key = dataset_key(keys, &own.domain, &own.dataset.name);
            let value = dataset_text(&own, own.bytes());
            let kv = found.remove(&key);
            if kv.is_none_or(|kv| kv.value != value) {
                tenants.insert(tenant_key(keys, &own.tenant), ());
                changes.push((Op::Put { key, value, lease: 0 }, Some(kv.map_or(0, |kv| kv.mod_revision))));
            }
        }
        let (registered, unregistered) = (changes.len(), found.len());
        for (key, kv) in found {
            if let DataKey::Dataset(domain, name) = parse_key(keys, &kv.key) {
                let record = read_dataset(kv, &domain, &name)?;
                tenants.insert(tenant_key(keys, &record.registration.tenant), ());
            }
            changes.push((Op::Delete { key }, Some(kv.mod_revision)));
        }
        changes.extend(tenants.into_keys().map(mark));
        Ok(Changes { ops: changes, registered, unregistered })
    }
}
