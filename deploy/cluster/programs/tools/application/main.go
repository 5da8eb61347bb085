// The application of the suite's pods: a server, and a client that repeats nothing and counts what fails.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/credentials/xds"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	_ "google.golang.org/grpc/xds"
)

func main() {
	switch os.Args[1] {
	case "serve":
		serve()
	case "load": // load URL: two connections kept and two new ones at a time, until standard input ends
		load(os.Args[2])
	case "get": // get URL: prints the answer; xds:///HOST:PORT asks for gRPC's health check without Envoy
		body, err := (&client{url: os.Args[2]}).get()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Stdout.Write(body)
	case "copy": // copy FROM TO
		data, err := os.ReadFile(os.Args[2])
		if err == nil {
			err = os.WriteFile(os.Args[3], data, 0o644)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case "healthy": // a probe by a command
	case "wait":
		time.Sleep(math.MaxInt64)
	}
}

// HTTP on 8080, gRPC's health check on 8081, an echo over TCP on 8082.
func serve() {
	go func() {
		server := grpc.NewServer()
		grpc_health_v1.RegisterHealthServer(server, health.NewServer())
		panic(server.Serve(listen(":8081")))
	}()
	go func() {
		for listener := listen(":8082"); ; {
			if connection, err := listener.Accept(); err == nil {
				go io.Copy(connection, connection)
			}
		}
	}()
	pod, _ := os.Hostname()
	var unhealthy atomic.Bool
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		wait, _ := time.ParseDuration(r.URL.Query().Get("wait"))
		time.Sleep(wait)
		from, _, _ := net.SplitHostPort(r.RemoteAddr)
		json.NewEncoder(w).Encode(map[string]string{
			"pod": pod, "from": from, "caller": r.Header.Get("X-Forwarded-Client-Cert"),
			"wasm": strings.Join(r.Header.Values("X-Wasm"), " ")})
	})
	// A registry of the files that are mounted here.
	http.HandleFunc("/v2/", func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/manifests/") {
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
		}
		http.ServeFile(w, r, r.URL.Path)
	})
	http.HandleFunc("/health", func(w http.ResponseWriter, r *http.Request) {
		if unhealthy.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	http.HandleFunc("/health/no", func(http.ResponseWriter, *http.Request) { unhealthy.Store(true) })
	http.HandleFunc("/health/yes", func(http.ResponseWriter, *http.Request) { unhealthy.Store(false) })
	panic(http.ListenAndServe(":8080", nil))
}

func listen(address string) net.Listener {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		panic(err)
	}
	return listener
}

// Go's own client would send some requests again.
type client struct {
	url        string
	kept       bool
	connection net.Conn
	reader     *bufio.Reader
	channel    *grpc.ClientConn
}

func (c *client) get() (body []byte, err error) {
	if strings.HasPrefix(c.url, "xds:") {
		return c.check()
	}
	request, err := http.NewRequest("GET", c.url, nil)
	if err != nil {
		return nil, err
	}
	request.Close = !c.kept
	if c.connection == nil {
		port := request.URL.Port()
		if port == "" {
			port = "80"
		}
		address := net.JoinHostPort(request.URL.Hostname(), port)
		if c.connection, err = net.DialTimeout("tcp", address, 5*time.Second); err != nil {
			return nil, err
		}
		c.reader = bufio.NewReader(c.connection)
	}
	closes := true
	defer func() {
		if closes {
			c.connection.Close()
			c.connection = nil
		}
	}()
	c.connection.SetDeadline(time.Now().Add(10 * time.Second))
	if err := request.Write(c.connection); err != nil {
		return nil, err
	}
	response, err := http.ReadResponse(c.reader, request)
	if err != nil {
		return nil, err
	}
	body, err = io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d: %.200s", response.StatusCode, body)
	}
	closes = err != nil || response.Close
	return body, err
}

func (c *client) check() ([]byte, error) {
	if c.channel == nil {
		credentials, err := xds.NewClientCredentials(xds.ClientOptions{FallbackCreds: insecure.NewCredentials()})
		if err != nil {
			return nil, err
		}
		if c.channel, err = grpc.NewClient(c.url, grpc.WithTransportCredentials(credentials)); err != nil {
			return nil, err
		}
	}
	if !c.kept {
		defer func() {
			c.channel.Close()
			c.channel = nil
		}()
	}
	within, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var server peer.Peer
	_, err := grpc_health_v1.NewHealthClient(c.channel).Check(
		within, &grpc_health_v1.HealthCheckRequest{}, grpc.Peer(&server))
	if err != nil {
		return nil, err
	}
	return json.Marshal(map[string]string{"pod": server.Addr.String(), "security": server.AuthInfo.AuthType()})
}

func load(url string) {
	var (
		lock    sync.Mutex
		running sync.WaitGroup
		stop    = make(chan struct{})
		sent    int
		pods    = map[string]int{}
		failed  = []string{}
		// Between the first failure and the last.
		first, last time.Time
	)
	for number := range 4 {
		running.Go(func() {
			client := client{url: url, kept: number < 2}
			for tick := time.Tick(20 * time.Millisecond); ; {
				select {
				case <-stop:
					return
				case <-tick:
				}
				kept := client.connection != nil
				begun := time.Now()
				body, err := client.get()
				var told struct{ Pod string }
				if err == nil {
					err = json.Unmarshal(body, &told)
				}
				lock.Lock()
				sent++
				if err != nil {
					if first.IsZero() {
						first = begun
					}
					last = time.Now()
					failed = append(failed, fmt.Sprintf("%s kept=%t after %v: %v",
						begun.UTC().Format("15:04:05.000"), kept, time.Since(begun).Round(time.Millisecond), err))
				} else {
					pods[told.Pod]++
				}
				lock.Unlock()
			}
		})
	}
	io.Copy(io.Discard, os.Stdin)
	close(stop)
	running.Wait()
	json.NewEncoder(os.Stdout).Encode(map[string]any{
		"sent": sent, "pods": pods, "failed": failed, "seconds": last.Sub(first).Seconds()})
}
