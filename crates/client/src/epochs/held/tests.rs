use super::*;

#[test]
fn a_lease_that_is_not_handed_out_is_not_held() {
    let held = Arc::new(HeldLeases::default());
    drop(LeaseHold::new(&held, 0, 1, 7, 100));
    assert!(held.is_empty());
    LeaseHold::new(&held, 0, 1, 7, 100).hand_out();
    assert_eq!(held.len(), 1);
    // The lease was handed out. A second request for it that fails does not release it.
    drop(LeaseHold::new(&held, 0, 1, 7, 100));
    assert_eq!(held.len(), 1);
    held.release(0, 1, 7);
    assert!(held.is_empty());
}

#[test]
fn renewals_fit_their_requests() {
    let held = HeldLeases::default();
    (0..10).for_each(|lease| held.hold(0, 0, lease, 100));
    held.hold(0, 1, 3, 100);
    held.hold(5, 0, 3, 100);
    let renewals = held.renewals(4);
    assert!(renewals.iter().all(|c| c.2.len() <= 4));
    let mut all: Vec<_> = renewals.iter().flat_map(|c| c.2.iter().map(|&l| (c.0, c.1, l))).collect();
    all.sort_unstable();
    let mut want: Vec<_> = (0..10).map(|l| (0, 0, l)).chain([(0, 1, 3), (5, 0, 3)]).collect();
    want.sort_unstable();
    assert_eq!(all, want);
}

/// A lease that lives for 900 ms is renewed after 300 ms.
///
/// With no lease held, the longest interval applies.
#[tokio::test(start_paused = true)]
async fn the_first_lease_is_renewed_in_time() {
    let held = HeldLeases::default();
    let began = Instant::now();
    let ((), ()) = tokio::join!(held.due(), async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        held.hold(0, 0, 1, 900);
    });
    assert_eq!(began.elapsed().as_millis() / 10, 30);
    held.release(0, 0, 1);
    let began = Instant::now();
    held.due().await;
    assert!(began.elapsed() >= HEARTBEAT_MAX);
}

/// I3: a lease that is received again before the server was told is kept, and one whose release is under way
/// is not.
#[tokio::test]
async fn a_lease_is_held_or_released() {
    let held = Arc::new(HeldLeases::default());
    drop(LeaseHold::new(&held, 0, 1, 7, 100));
    assert!(held.is_releasing(0, 1, 7) && !held.is_settled());
    let again = LeaseHold::new(&held, 0, 1, 7, 100);
    assert!(again.is_held() && held.is_settled(), "it is received again");
    // A second request for the same lease takes it over from the first.
    let other = LeaseHold::new(&held, 0, 1, 7, 100);
    drop(again);
    assert!(other.is_held() && held.is_settled());
    drop(other);
    assert_eq!(held.next_releases(9).await, (0, 1, vec![7]));
    let late = LeaseHold::new(&held, 0, 1, 7, 100);
    assert!(!late.is_held() && held.is_releasing(0, 1, 7), "the server may have ended it");
    drop(late);
    held.release_ended(0, 1, &[7]);
    assert!(held.is_settled() && held.is_empty());
    // An acknowledged lease needs no release.
    held.hold(0, 1, 8, 100);
    held.forget(0, 1, 8);
    assert!(held.is_settled() && held.is_empty());
}

/// Releases are bounded, and go out by rank in bounded requests. `settled` waits for all of them.
#[tokio::test]
async fn releases_fit_their_requests() {
    let held = Arc::new(HeldLeases::default());
    (0..RELEASES_MAX as u64 + 5).for_each(|lease| held.release(3, 0, lease));
    let mut sent = 0;
    let ((), ()) = tokio::join!(held.settled(), async {
        while !held.is_settled() {
            let (epoch, rank, leases) = held.next_releases(4096).await;
            assert!((epoch, rank) == (3, 0) && leases.len() <= 4096);
            sent += leases.len();
            held.release_ended(epoch, rank, &leases);
        }
    });
    assert_eq!(sent, RELEASES_MAX, "the others expire");
    let unanswered = Unanswered::new(&held);
    assert!(!held.is_settled(), "the request may still get a lease");
    drop(unanswered);
    held.settled().await;
}
