// An Envoy that fails when it is to take over from another Envoy. BROKEN_ENVOY says how.
package main

import (
	"bytes"
	"os"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

func main() {
	how := os.Getenv("BROKEN_ENVOY")
	if slices.Contains(os.Args, "--restart-epoch") {
		if how == "exits" {
			os.Exit(1)
		}
		// It finds no agent, and so it waits for its configuration.
		path := os.Args[slices.Index(os.Args, "-c")+1]
		bootstrap, err := os.ReadFile(path)
		if err == nil {
			bootstrap = bytes.ReplaceAll(bootstrap, []byte("/XDS-"), []byte("/missing-"))
			err = os.WriteFile(path, bootstrap, 0o600)
		}
		if err != nil {
			panic(err)
		}
		if how == "crashes" {
			// The signal comes to the program that follows.
			unix.Setitimer(unix.ITIMER_REAL, unix.Itimerval{Value: unix.Timeval{Sec: 2}})
		}
	}
	panic(syscall.Exec("/usr/local/bin/real-envoy", os.Args, os.Environ()))
}
