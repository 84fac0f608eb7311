use super::*;
use proptest::prelude::*;

const LIMITS: TableLimits = TableLimits { tcp: 8, unix: 4, per_caller: 5, probes: 3 };

fn host(n: u8) -> Source {
    Source::of(IpAddr::from([10, 0, 0, n]))
}

fn tenant(name: &str) -> Tenant {
    Tenant::new(name).expect("a name")
}

/// Every connection waits for a request since the time of its number.
fn all_idle(id: ConnectionId) -> Option<u64> {
    Some(id)
}

fn all_busy(_: ConnectionId) -> Option<u64> {
    None
}

fn admit(table: &mut ConnectionTable, id: ConnectionId, source: Source) -> Admission {
    table.admit(id, source, all_idle)
}

#[test]
fn a_source_at_its_limit_loses_its_own_oldest_unproven_connection() {
    let mut table = ConnectionTable::new(LIMITS);
    assert_eq!(admit(&mut table, 0, host(2)), Admission { refused: None, close: None });
    for id in 1..=5 {
        assert_eq!(admit(&mut table, id, host(1)).close, None);
    }
    table.prove(1, None, all_idle).expect("no limit of tenants");
    // Of the source: neither the connection of another source, which is older, nor the proven one.
    assert_eq!(admit(&mut table, 6, host(1)), Admission { refused: None, close: Some(2) });
    assert_eq!(table.open(Listener::Tcp), 6);
}

#[test]
fn a_full_listener_loses_unproven_connections_first_then_idle_ones_of_the_largest_source() {
    let mut table = ConnectionTable::new(LIMITS);
    for id in 0..8 {
        admit(&mut table, id, host(if id < 5 { 1 } else { 2 }));
    }
    for id in [0, 1, 2, 3, 4, 5, 7] {
        table.prove(id, None, all_idle).expect("no limit of tenants");
    }
    assert_eq!(admit(&mut table, 8, host(3)).close, Some(6), "the unproven one");
    table.prove(8, None, all_idle).expect("no limit of tenants");
    assert_eq!(admit(&mut table, 9, host(3)).close, Some(0), "the longest idle one of host 1");
}

#[test]
fn with_nothing_to_close_a_newcomer_is_in_the_probe_lane_and_the_lane_never_fills() {
    let mut table = ConnectionTable::new(LIMITS);
    for id in 0..8 {
        admit(&mut table, id, host(u8::try_from(id).expect("few")));
        table.prove(id, None, all_busy).expect("no limit of tenants");
    }
    for id in 8..11 {
        let admission = table.admit(id, host(9), all_busy);
        assert_eq!(admission, Admission { refused: Some(Refusal::All), close: None });
    }
    let admission = table.admit(11, host(9), all_busy);
    assert_eq!(admission, Admission { refused: Some(Refusal::All), close: Some(8) });
    assert_eq!((table.open(Listener::Tcp), table.in_probe_lanes()), (8, 3));
    // The socket has connections of its own. A user has half of them.
    assert_eq!(table.admit(12, Source::User(7), all_busy).refused, None);
    assert_eq!(table.admit(13, Source::User(7), all_busy).refused, None);
    table.prove(12, None, all_busy).expect("no limit of tenants");
    table.prove(13, None, all_busy).expect("no limit of tenants");
    assert_eq!(table.admit(14, Source::User(7), all_busy).refused, Some(Refusal::Source));
    assert_eq!(table.admit(15, Source::User(8), all_busy).refused, None);
}

#[test]
fn a_tenant_at_its_limit_loses_its_longest_idle_connection_or_is_refused() {
    let mut table = ConnectionTable::new(LIMITS);
    for id in 0..6 {
        admit(&mut table, id, host(u8::try_from(id).expect("few")));
    }
    for id in 0..5 {
        assert_eq!(table.prove(id, Some(&tenant("a")), all_idle), Ok(None));
    }
    assert_eq!(table.prove(5, Some(&tenant("a")), all_busy), Err(Refusal::Tenant));
    assert_eq!(table.prove(5, Some(&tenant("a")), all_idle), Ok(Some(0)));
    assert_eq!(table.prove(5, Some(&tenant("a")), all_busy), Ok(None), "it is counted already");
    admit(&mut table, 6, host(7));
    assert_eq!(table.prove(6, Some(&tenant("b")), all_busy), Ok(None), "another tenant");
}

#[test]
fn shedding_takes_the_oldest_unproven_connection_that_holds_memory() {
    let mut table = ConnectionTable::new(LIMITS);
    for id in 0..4 {
        admit(&mut table, id, host(1));
    }
    table.prove(1, None, all_idle).expect("no limit of tenants");
    assert_eq!(table.shed(host(1), |id| id >= 1), Some(2));
    assert_eq!(table.shed(host(2), |_| true), Some(0), "the oldest of any source");
    assert_eq!(table.shed(host(1), |_| false), None);
    assert_eq!(table.open(Listener::Tcp), 2);
}

#[test]
fn sources_are_hosts() {
    let v6 = |text: &str| Source::of(text.parse().expect("an address"));
    assert_eq!(v6("2001:db8::1"), v6("2001:db8::ffff:2"));
    assert_ne!(v6("2001:db8::1"), v6("2001:db8:0:1::1"));
    assert_eq!(v6("::ffff:10.0.0.1"), host(1));
}

#[derive(Debug, Clone)]
enum Step {
    Come(Source),
    Prove(usize, Option<u8>),
    Busy(usize, bool),
    Leave(usize),
}

/// The open connections: their source, whether they are proven, and whether they run a request.
type Live = BTreeMap<ConnectionId, (Source, bool, bool)>;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let source = prop_oneof![(0u8..4).prop_map(host), (0u32..3).prop_map(Source::User)];
    let step = prop_oneof![
        4 => source.prop_map(Step::Come),
        2 => (any::<usize>(), proptest::option::of(0u8..2)).prop_map(|(i, t)| Step::Prove(i, t)),
        2 => (any::<usize>(), any::<bool>()).prop_map(|(i, b)| Step::Busy(i, b)),
        1 => any::<usize>().prop_map(Step::Leave),
    ];
    proptest::collection::vec(step, 0..200)
}

proptest! {
    /// The invariants of the module, over any sequence of events.
    #[test]
    fn limits_hold_and_no_running_request_of_a_known_caller_is_closed(steps in steps()) {
        let mut table = ConnectionTable::new(LIMITS);
        let mut live = Live::new();
        let mut lane: BTreeSet<ConnectionId> = BTreeSet::new();
        for (id, step) in (0u64..).zip(steps) {
            let nth = |i: usize, live: &BTreeMap<ConnectionId, _>| {
                live.keys().nth(i % live.len().max(1)).copied()
            };
            let busy: BTreeSet<_> = live.iter().filter(|(_, l)| l.2).map(|(id, _)| *id).collect();
            let idle = |id: ConnectionId| (!busy.contains(&id)).then_some(id);
            let mut closed = |close: Option<ConnectionId>, live: &mut Live| {
                if let Some(close) = close {
                    match live.remove(&close) {
                        Some((_, proven, busy)) => prop_assert!(!(proven && busy), "{close} runs a request"),
                        None => prop_assert!(lane.remove(&close), "{close} is not open"),
                    }
                }
                Ok(())
            };
            match step {
                Step::Come(source) => {
                    let admission = table.admit(id, source, idle);
                    closed(admission.close, &mut live)?;
                    if admission.refused.is_none() {
                        live.insert(id, (source, false, false));
                    } else {
                        lane.insert(id);
                    }
                }
                Step::Prove(i, of) => {
                    if let Some(at) = nth(i, &live) {
                        let of = of.map(|n| tenant(&format!("t{n}")));
                        let others = |id| idle(id).filter(|id| *id != at);
                        if let Ok(close) = table.prove(at, of.as_ref(), others) {
                            closed(close, &mut live)?;
                            if let Some(l) = live.get_mut(&at) {
                                l.1 = true;
                            }
                        }
                    }
                }
                Step::Busy(i, is) => {
                    if let Some(l) = nth(i, &live).and_then(|at| live.get_mut(&at)) {
                        l.2 = is;
                    }
                }
                Step::Leave(i) => {
                    if let Some(at) = nth(i, &live) {
                        table.remove(at);
                        live.remove(&at);
                    }
                }
            }
            prop_assert!(table.open(Listener::Tcp) <= LIMITS.tcp);
            prop_assert!(table.open(Listener::Unix) <= LIMITS.unix);
            prop_assert_eq!(table.open(Listener::Tcp) + table.open(Listener::Unix), live.len());
            prop_assert_eq!(table.in_probe_lanes(), lane.len());
            prop_assert!(table.in_probe_lanes() <= 2 * LIMITS.probes);
            for of in table.tenants.values() {
                prop_assert!(of.len() <= LIMITS.per_caller);
            }
        }
    }
}
