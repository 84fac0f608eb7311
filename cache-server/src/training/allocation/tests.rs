//! Tests of decisions over claims and readers, without a server.

use super::*;
use crate::training::allocation::problem::{Demand, build};
use fletch_api::{JobSettings, benefit::BenefitVerdict};
use fletch_core::{DatasetName, Domain, JobName, Tenant};
use fletch_store::{DatasetId, QuotaUse, Split, apply_quotas, disk::Claim};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

const MIB: u64 = 1 << 20;

fn claim(dataset: u64, mib: u64) -> Claim {
    Claim::alone(DatasetId(dataset), Some(mib * MIB), Some(mib * MIB))
}

fn tenant(name: &str) -> Tenant {
    Tenant::new(name).expect("name")
}

/// A job in its second epoch, whose link carries 10 MiB/s. `most` is in MiB/s.
fn reader(id: &str, dataset: u64, most: f64) -> Reader {
    let rate = most * 1024.0;
    Reader {
        id: id.to_owned(),
        name: JobName::new(id).expect("name"),
        tenant: Tenant::default_tenant(),
        domain: Domain::default_domain(),
        dataset: DatasetName::new("d").expect("name"),
        shares: vec![DatasetId(dataset)],
        is_strict: false,
        is_first_pass: false,
        settings: JobSettings::default(),
        unit_bytes: MIB / 4,
        link: format!("s3://bucket-{dataset}"),
        bandwidth: Some(10.0 * MIB as f64),
        measured: Some(Measured {
            rate: rate / 2.0,
            most_rate: rate,
            sample_bytes: 1024.0,
            verdict: BenefitVerdict::Origin,
            parts: [0.5, 0.0, 0.5],
            cached: 0.0,
            origin_rate: Some(rate / 2.0),
            disk_rate: None,
        }),
    }
}

/// Divides a disk of 100 MiB by claims, as the server does it. Returns the MiB of each share.
fn decide(claims: &Split, readers: &[Reader], limits: &Limits) -> (Allocator, BTreeMap<u64, u64>) {
    let allocator = Allocator::default();
    allocator.divide(claims.clone(), claims.clone(), 100 * MIB, Vec::new());
    allocator.decide(readers, limits);
    let shares = shares(&allocator, claims);
    (allocator, shares)
}

fn shares(allocator: &Allocator, claims: &Split) -> BTreeMap<u64, u64> {
    let divided = allocator.divide(claims.clone(), claims.clone(), 100 * MIB, Vec::new());
    assert!(divided.iter().filter_map(|c| c.want).sum::<u64>() <= 100 * MIB, "{divided:?}");
    divided.iter().map(|c| (c.dataset.0, c.want.expect("a share") / MIB)).collect()
}

#[test]
fn measured_datasets_divide_what_they_would_have_by_reads() {
    let claims = vec![claim(1, 300), claim(2, 300), claim(3, 300)];
    let readers = [reader("computes", 1, 5.0), reader("waits", 2, 40.0)];
    // Nobody measured the third dataset, which jobs and a mount read.
    let (allocator, got) = decide(&claims, &readers, &Limits::default());
    let idle = &allocator.current().idle;
    assert_eq!(idle, &BTreeSet::from([DatasetId(3)]), "no job reads it");
    assert!(got[&2] >= 90 && got[&1] >= 1 && got[&3] == 0, "{got:?}");
    let plain = Limits { plain: BTreeSet::from([DatasetId(3)]), ..Limits::default() };
    let (allocator, got) = decide(&claims, &readers, &plain);
    assert!((32..=34).contains(&got[&3]), "a mount reads it: {got:?}");
    assert!(got[&2] >= 58 && got[&1] >= 1, "{got:?}");
    assert_eq!(allocator.current().divided / MIB, 66);
    let new = Reader { measured: None, ..reader("third", 3, 80.0) };
    let (_, got) = decide(&claims, &[readers[0].clone(), readers[1].clone(), new], &Limits::default());
    assert!((32..=34).contains(&got[&3]), "its job is not measured: {got:?}");
    // A bound may be anything. A job that waits gets no less with it than one of which the rate is known.
    for most in [80.0, 1e290] {
        let third = Reader { measured: reader("third", 3, most).measured, ..reader("third", 3, 80.0) };
        let (_, got) = decide(&claims, &[readers[0].clone(), readers[1].clone(), third], &Limits::default());
        assert!(got[&2] + got[&3] >= 90 && got[&3] >= got[&2], "{got:?}");
    }
}

#[test]
fn a_bound_keeps_what_a_value_has() {
    let claims = vec![claim(1, 300), claim(2, 300)];
    let readers = [reader("computes", 1, 5.0), reader("waits", 2, 40.0)];
    let (allocator, before) = decide(&claims, &readers, &Limits::default());
    // In a part of its pass it waits for the origin only, so its acks tell a bound.
    let bound = Measured { most_rate: 50.0 * 1024.0, ..readers[1].measured.expect("it is") };
    let waits = [readers[0].clone(), Reader { measured: Some(bound), ..readers[1].clone() }];
    allocator.decide(&waits, &Limits::default());
    assert_eq!(shares(&allocator, &claims), before);
    assert_eq!(allocator.current().job_rates().len(), 2);
}

#[test]
fn a_share_that_shrinks_by_reads_shrinks_the_division() {
    let claims = vec![claim(1, 300), claim(2, 300)];
    let readers = [reader("computes", 1, 5.0), reader("waits", 2, 40.0)];
    let (allocator, before) = decide(&claims, &readers, &Limits::default());
    // Somebody begins to read a third dataset before the next decision.
    let more = [claims.clone(), vec![claim(3, 300)]].concat();
    let after = shares(&allocator, &more);
    assert!((32..=34).contains(&after[&3]), "{after:?}");
    let kept = after[&2] as f64 / before[&2] as f64;
    assert!((0.6..0.7).contains(&kept), "{before:?} {after:?}");
}

#[test]
fn a_least_share_is_kept_before_and_after_jobs_are_measured() {
    let claims = vec![claim(1, 300), claim(2, 300)];
    let least = JobSettings { min_share_bytes: Some(70 * MIB), ..JobSettings::default() };
    let mut readers = [Reader { settings: least, ..reader("computes", 1, 5.0) }, reader("waits", 2, 40.0)];
    let (_, got) = decide(&claims, &readers, &Limits::default());
    assert!(got[&1] >= 69 && got[&2] >= 29, "{got:?}");
    readers.iter_mut().for_each(|r| r.measured = None);
    let (allocator, got) = decide(&claims, &readers, &Limits::default());
    assert_eq!(allocator.current().outcome, Outcome::NotMeasured);
    assert!(got[&1] >= 70 && got[&2] <= 30, "{got:?}");
}

#[test]
fn jobs_divide_the_weight_of_their_tenant() {
    let of = |name: &str, r: Reader| Reader { tenant: tenant(name), ..r };
    let heavy = JobSettings { weight: Some(3.0), ..JobSettings::default() };
    let readers = [
        of("a", Reader { settings: heavy, ..reader("a1", 1, 40.0) }),
        of("a", reader("a2", 2, 40.0)),
        of("b", reader("b1", 2, 40.0)),
    ];
    let claims = vec![claim(1, 300), claim(2, 300)];
    let demand = Demand { claims: claims.clone(), limited: claims, capacity: 100 * MIB, quotas: Vec::new() };
    let tenants = BTreeMap::from([(tenant("b"), TenantShare { weight: 2.0, min_share: 0 })]);
    let bandwidths = readers.iter().map(|r| (r.link.clone(), 1e7)).collect();
    let built = build(&demand, &readers, &tenants, &BTreeSet::new(), &bandwidths);
    let weights: BTreeMap<_, _> =
        built.jobs.iter().map(String::as_str).zip(built.problem.jobs.iter().map(|j| j.weight)).collect();
    assert_eq!(weights, BTreeMap::from([("a1", 0.75), ("a2", 0.25), ("b1", 2.0)]));
    // A lone job that reads for the first time may never come back to what it reads.
    let first = Reader { is_first_pass: true, ..reader("a", 1, 40.0) };
    let built = build(&demand, &[first], &BTreeMap::new(), &BTreeSet::new(), &bandwidths);
    assert_eq!(built.problem.jobs[0].weight, 0.25);
}

#[test]
fn quotas_and_the_least_shares_of_tenants_limit_a_division() {
    let claims = vec![claim(1, 300), claim(2, 300), claim(3, 300)];
    let readers = [
        Reader { tenant: tenant("a"), ..reader("a1", 1, 40.0) },
        Reader { tenant: tenant("b"), ..reader("b1", 2, 4.0) },
        Reader { tenant: tenant("c"), ..reader("c1", 3, 40.0) },
    ];
    let quotas = vec![(20 * MIB, vec![QuotaUse { dataset: DatasetId(1), plain: DatasetId(1), bytes: 0 }])];
    let limited = apply_quotas(claims.clone(), &quotas);
    let allocator = Allocator::default();
    allocator.divide(claims.clone(), limited.clone(), 100 * MIB, quotas.clone());
    let share = TenantShare { weight: 1.0, min_share: 30 * MIB };
    let limits = Limits { tenants: BTreeMap::from([(tenant("b"), share)]), ..Limits::default() };
    assert!(allocator.decide(&readers, &limits));
    let current = allocator.current();
    let mib = |id| current.shares[&DatasetId(id)] / MIB;
    assert!(mib(1) <= 20 && mib(2) >= 29 && mib(3) >= 45, "{current:?}");
    // What is not decided anew is no reason to divide the disk anew.
    assert!(!allocator.decide(&readers, &limits));
}

#[test]
fn a_decision_is_due_when_jobs_come_or_settings_change() {
    let allocator = Allocator::default();
    let running =
        |weight| BTreeMap::from([("j".to_owned(), JobSettings { weight, ..JobSettings::default() })]);
    let hour = Duration::from_secs(3600);
    assert!(allocator.is_due(running(None), hour), "there was none");
    allocator.decide(&[], &Limits::default());
    assert!(!allocator.is_due(running(None), hour));
    assert!(allocator.is_due(running(Some(2.0)), hour) && !allocator.is_due(running(Some(2.0)), hour));
    assert!(allocator.is_due(BTreeMap::new(), hour));
    assert!(allocator.is_due(BTreeMap::new(), Duration::ZERO), "the interval is over");
}

#[test]
fn a_job_that_is_measured_has_a_speed_and_a_place() {
    let claims = vec![claim(1, 300), claim(2, 300)];
    let readers = [reader("computes", 1, 5.0), reader("waits", 2, 40.0)];
    let (allocator, got) = decide(&claims, &readers, &Limits::default());
    let current = allocator.current();
    let rates = current.job_rates();
    assert_eq!(rates.len(), 2);
    assert!((rates["computes"].speed - 1.0).abs() < 1e-9 && rates["waits"].speed < 0.5, "{rates:?}");
    let values = current.byte_values();
    assert!(values[&DatasetId(2)] > 2.0 * values[&DatasetId(1)], "{values:?}");
    let speed = |mib: u64| current.speed_at(DatasetId(2), mib * MIB).expect("it is divided");
    assert!(speed(0) < speed(got[&2]) && speed(got[&2]) < speed(300), "{got:?}");
    assert_eq!(current.speed_at(DatasetId(9), 0), None);
}

#[test]
fn three_jobs_come_before_one_and_a_scan_gets_its_least_share() {
    let claims = vec![claim(1, 60), claim(2, 60), claim(3, 600)];
    let at_one_link = |r: Reader| Reader { link: "s3://bucket".to_owned(), ..r };
    let least = JobSettings { min_share_bytes: Some(5 * MIB), ..JobSettings::default() };
    let scan = Reader { is_first_pass: true, settings: least, ..reader("scan", 3, 400.0) };
    let readers: Vec<Reader> = ["x1", "x2", "x3"]
        .map(|id| reader(id, 1, 400.0))
        .into_iter()
        .chain([reader("y", 2, 400.0), scan])
        .map(at_one_link)
        .collect();
    let (_, got) = decide(&claims, &readers, &Limits::default());
    assert!(got[&1] >= 59 && got[&2] >= 34 && (4..=6).contains(&got[&3]), "{got:?}");
}
