//! Recovers the cluster of a server whose etcd lost its keys: asks all members what they hold, has each write
//! its part, and puts the cluster in force.

use super::Server;
use crate::cluster::{RecoverError, RecoveryMark};
use fletch_api::{
    cluster::{HeldKeys, Recovery},
    routes,
};
use fletch_core::Hash;
use reqwest::Method;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// How long the members may take to say what they hold.
const HELD_WITHIN: Duration = Duration::from_secs(5);
/// How long each member may take to write it.
const WRITTEN_WITHIN: Duration = Duration::from_secs(60);

/// How a recovery is to be done.
#[derive(Debug, Clone, Default)]
pub struct RecoverPlan {
    /// Whether nothing is written.
    pub is_dry: bool,
    /// Whether members that do not answer are left out.
    pub without_silent: bool,
    /// The member whose datasets count, if the members differ.
    pub datasets_from: Option<String>,
}

impl Server {
    /// Returns what this server holds of its cluster.
    #[must_use]
    pub fn held_keys(&self) -> HeldKeys {
        let view = self.cluster.view();
        let mut datasets = Vec::new();
        let mut hashed = String::new();
        for own in self.registrations.all() {
            let name = format!("{}/{}", own.domain, own.dataset.name);
            hashed += &format!("{name} {} {} {}\n", own.tenant, own.dataset.uri, own.dataset.tables);
            datasets.push(name);
        }
        HeldKeys {
            id: self.cluster.own_id().to_string(),
            uid: self.cluster.uid(),
            view: view.core.number(),
            ring: view.core.ring().clone(),
            registrations: self.catalog.revision().unwrap_or(0),
            datasets_hash: Hash::of(hashed.as_bytes()).to_string(),
            datasets,
            jobs: self.groups.held_jobs(&self.registry),
        }
    }

    /// Writes what this server holds of its cluster back to etcd, where a recovery runs.
    ///
    /// # Errors
    /// [`RecoverError`].
    pub async fn write_back(&self, with_datasets: bool) -> Result<(), RecoverError> {
        let of = self.cluster.shared_keys().ok_or(RecoverError::Embedded)?;
        let uid = self.cluster.uid().ok_or(RecoverError::NeverJoined)?;
        let mark: RecoveryMark = of.recovery_mark(&uid).await?.ok_or(RecoverError::Overtaken)?;
        self.groups.write_back(&self.registry, mark).await?;
        if with_datasets {
            self.catalog.write_back(mark).await?;
        }
        Ok(())
    }

    /// Writes the keys of the cluster back to an etcd that lost them.
    ///
    /// # Errors
    /// [`RecoverError`].
    pub async fn recover(&self, plan: &RecoverPlan) -> Result<Recovery, RecoverError> {
        let recovering = self.cluster.plan_recovery().await?;
        let others = recovering.others();
        let answers = recovering.ask(&others, (Method::GET, routes::PEER_KEYS), HELD_WITHIN).await;
        let (mut held, mut silent) = (vec![self.held_keys()], Vec::new());
        for (id, answer) in answers {
            let read = answer.and_then(|body| {
                let keys: HeldKeys = serde_json::from_slice(&body).map_err(|e| e.to_string())?;
                match keys.uid.as_deref() == Some(&recovering.uid) {
                    true => Ok(keys),
                    false => Err("it has joined another cluster, or none".to_owned()),
                }
            });
            match read {
                Ok(keys) => held.push(keys),
                Err(why) => silent.push(format!("{id}: {why}")),
            }
        }
        if !silent.is_empty() && !plan.without_silent && !plan.is_dry {
            return Err(RecoverError::Silent(silent));
        }
        let source = source(&held, plan.datasets_from.as_deref())?;
        let ring = held.iter().max_by_key(|keys| keys.view).map(|keys| keys.ring.clone()).unwrap_or_default();
        let jobs: BTreeMap<String, String> = held.iter().flat_map(|keys| keys.jobs.clone()).collect();
        let recovery = Recovery {
            uid: recovering.uid.clone(),
            is_done: !plan.is_dry,
            datasets_from: source.id.clone(),
            datasets: source.datasets.clone(),
            jobs: jobs.into_iter().map(|(id, name)| format!("{name} ({id})")).collect(),
            members: ring.members().iter().map(|m| m.id.to_string()).collect(),
            silent,
        };
        if plan.is_dry {
            return Ok(recovery);
        }
        let mark = recovering.begin().await?;
        let own = self.cluster.own_id().as_str();
        self.write_back(source.id == own).await?;
        // One after the other: they write the same keys.
        for keys in &held[1..] {
            let path = format!("{}?datasets={}", routes::PEER_KEYS, source.id == keys.id);
            let ids: Vec<_> = others.iter().filter(|id| id.as_str() == keys.id).cloned().collect();
            for (id, answer) in recovering.ask(&ids, (Method::PUT, &path), WRITTEN_WITHIN).await {
                answer.map_err(|why| RecoverError::Part(id.to_string(), why))?;
            }
        }
        recovering.commit(mark, &ring).await?;
        Ok(recovery)
    }
}

/// Returns the member whose datasets count: the one that executed the latest change. Members that started
/// since etcd lost its keys do not know how late theirs are; if they differ, somebody has to choose.
fn source<'a>(held: &'a [HeldKeys], wanted: Option<&str>) -> Result<&'a HeldKeys, RecoverError> {
    if let Some(id) = wanted {
        return held.iter().find(|k| k.id == id).ok_or_else(|| RecoverError::NoMember(id.to_owned()));
    }
    let hashes: BTreeSet<&str> = held.iter().map(|keys| keys.datasets_hash.as_str()).collect();
    let latest = held.iter().max_by_key(|keys| keys.registrations);
    match latest {
        Some(latest) if latest.registrations > 0 || hashes.len() == 1 => Ok(latest),
        _ => {
            let text = |keys: &HeldKeys| format!("{} has {}", keys.id, keys.datasets.len());
            Err(RecoverError::DatasetsDiffer(held.iter().map(text).collect()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::cluster::Ring;

    fn held(id: &str, registrations: u64, datasets: &[&str]) -> HeldKeys {
        HeldKeys {
            id: id.to_owned(),
            uid: None,
            view: 1,
            ring: Ring::default(),
            registrations,
            datasets_hash: datasets.concat(),
            datasets: datasets.iter().map(|&name| name.to_owned()).collect(),
            jobs: BTreeMap::new(),
        }
    }

    #[test]
    fn the_datasets_of_the_latest_change_count() {
        let latest = [held("a", 7, &["one"]), held("b", 9, &["two"]), held("c", 0, &["three"])];
        assert_eq!(source(&latest, None).expect("known").id, "b");
        assert_eq!(source(&latest, Some("a")).expect("chosen").id, "a");
        assert!(matches!(source(&latest, Some("d")), Err(RecoverError::NoMember(_))));
        let equal = [held("a", 0, &["one"]), held("b", 0, &["one"])];
        assert_eq!(source(&equal, None).expect("equal").datasets, ["one"]);
        let differ = [held("a", 0, &["one"]), held("b", 0, &["two", "three"])];
        let told = source(&differ, None).expect_err("differ").to_string();
        assert!(told.contains("a has 1; b has 2"), "{told}");
    }
}
