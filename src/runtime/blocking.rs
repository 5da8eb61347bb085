//! Runs blocking calls, such as file operations, on other threads: a limited number, and with a time limit.

use std::time::Duration;

use tokio::sync::Semaphore;

use crate::runtime::duration::rounded;

/// The threads that file operations may hold at once.
pub(crate) static THREADS: Semaphore = Semaphore::const_new(32);

/// Runs `work` on a thread of a limited number, because work that hangs holds its thread. Fails after `limit`.
pub(crate) async fn run_within<T: Send + 'static>(
    limit: Duration,
    threads: &'static Semaphore,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let task = async {
        let thread = threads.acquire().await;
        tokio::task::spawn_blocking(move || {
            let _thread = thread;
            work()
        })
        .await
    };
    tokio::time::timeout(limit, task)
        .await
        .map_err(|_| unfinished(limit))?
        .map_err(|panic| panic.to_string())
}

pub(crate) fn unfinished(limit: Duration) -> String {
    format!("not finished within {}", rounded(limit))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};

    use super::*;

    #[tokio::test]
    async fn file_work_that_hangs_holds_a_bounded_number_of_threads() {
        static TWO: Semaphore = Semaphore::const_new(2);
        let limit = Duration::from_millis(50);
        let begun = Arc::new(AtomicUsize::new(0));
        let hung: Vec<mpsc::Sender<()>> = futures_util::future::join_all((0..4).map(async |_| {
            let (release, released) = mpsc::channel();
            let begun = begun.clone();
            let work = move || {
                begun.fetch_add(1, Ordering::Relaxed);
                released.recv()
            };
            let late = run_within(limit, &TWO, work).await.unwrap_err();
            assert_eq!(late, "not finished within 50 ms");
            release
        }))
        .await;
        assert!(run_within(limit, &TWO, || ()).await.is_err());
        assert_eq!(begun.load(Ordering::Relaxed), 2);
        drop(hung);
        assert_eq!(run_within(Duration::from_secs(2), &TWO, || 7).await, Ok(7));
    }
}
