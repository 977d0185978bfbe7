package soak

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// What a hostile pod gives its interface: so many alternative names of the longest length that the kernel accepts
// (ALTIFNAMSIZ) that the answer about it is larger than what libraries read at once.
const (
	manyNames  = 300
	nameLength = 127
)

// harm does to the pod's interface what a container with NET_ADMIN can do: it renames it, reads all frames, gives it
// names, and puts a macvlan on it that lives in a namespace of an accomplice.
func (l *life) harm(s sandbox) error {
	h := s.Handle()
	net1, err := h.LinkByName("net1")
	if err != nil {
		if l.cards.justReset() {
			return nil
		}
		return fmt.Errorf("net1: %w", err)
	}
	if l.accomplice, err = netns.Make(l.path("ns-accomplice-" + s.id)); err != nil {
		return err
	}

	spy := netlink.NewLinkAttrs()
	spy.Name, spy.ParentIndex = "spy", net1.Attrs().Index
	spy.Namespace = netlink.NsFd(l.accomplice.Fd())
	steps := []error{
		h.SetPromiscOn(net1),
		h.LinkSetAllmulticastOn(net1),
		h.LinkSetMTU(net1, 1000+l.random.IntN(400)),
		h.LinkAdd(&netlink.Macvlan{LinkAttrs: spy, Mode: netlink.MACVLAN_MODE_PRIVATE}),
	}
	for n := range manyNames {
		name := fmt.Sprintf("%s-%d-", l.name, n)
		steps = append(steps, h.LinkAddAltName(net1, name+strings.Repeat("x", nameLength-len(name))))
	}
	steps = append(steps, h.LinkSetDown(net1), h.LinkSetName(net1, "eth7"), h.LinkSetUp(net1))
	if link, err := l.accomplice.Handle().LinkByName("spy"); err == nil {
		steps = append(steps, l.accomplice.Handle().LinkSetUp(link))
	}
	if err := errors.Join(steps...); err != nil && !l.cards.justReset() {
		return fmt.Errorf("harm: %w", err)
	}
	return nil
}

// betray says whether the pod's macvlan has outlived the pod although the Function is offered to others.
func (l *life) betray() error {
	if l.accomplice == nil {
		return nil
	}
	defer l.accomplice.Close()
	return await(l.t.Context(), "nothing is left on the interface of "+l.name, func() error {
		if _, err := l.accomplice.Handle().LinkByName("spy"); err != nil {
			return nil
		}
		kept, err := l.quarantined()
		if err == nil && kept[l.function] == "" {
			err = fmt.Errorf("Function %s still has a macvlan in another namespace, and is not in quarantine", l.function)
		}
		return err
	})
}

// administrator asks the agent at its socket for administrators. The answer is not read by pkg/nodestate, so that a test that
// knows more than an older agent can ask that one.
func (n *node) administrator(path string) ([]byte, error) {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", n.path("state/admin.sock"))
	}}
	defer transport.CloseIdleConnections()
	client := http.Client{Transport: transport, Timeout: 5 * time.Second}
	response, err := client.Get("http://xpu-agent" + path)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	return io.ReadAll(response.Body)
}

// quarantined are the Functions that the agent keeps from all pods, with the reason.
func (n *node) quarantined() (map[function.ID]string, error) {
	body, err := n.administrator("/state")
	if err != nil {
		return nil, err
	}
	var state struct {
		Functions []struct {
			ID         function.ID     `json:"function"`
			Attachment json.RawMessage `json:"attachment"`
		} `json:"functions"`
	}
	if err := json.Unmarshal(body, &state); err != nil {
		return nil, err
	}

	kept := map[function.ID]string{}
	for _, f := range state.Functions {
		if reason := reasonIn(f.Attachment); reason != "" {
			kept[f.ID] = reason
		}
	}
	return kept, nil
}

// quarantineOf is why a record keeps its Function from all pods, "" if it does not.
func quarantineOf(a journal.Attachment) string {
	text, err := json.Marshal(a)
	if err != nil {
		return ""
	}
	return reasonIn(text)
}

func reasonIn(attachment []byte) string {
	var a struct {
		Quarantine struct{ Reason, Message string }
	}
	if json.Unmarshal(attachment, &a) != nil || a.Quarantine.Reason == "" {
		return ""
	}
	return a.Quarantine.Reason + ": " + a.Quarantine.Message
}
