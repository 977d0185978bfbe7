// SPDX-License-Identifier: Apache-2.0

package access

// Tenant returns the subject of the client that a port in these networks belongs to. It belongs to
// the client whose rule lets it change the port, if there is exactly one such rule besides those
// for all networks and ports. Otherwise it is not known whom the port belongs to, and Tenant
// returns "".
func (c *Credentials) Tenant(port string, networks []string) string {
	authorization := c.current.Load().authorization
	if authorization == nil {
		return ""
	}

	tenant := ""
	for _, r := range authorization.Rules {
		client := Client{Subject: r.Subject, restricted: true, rule: r}
		if r.ReadOnly || client.CanSeeAll() || !client.CanSeePort(port, networks) {
			continue
		}
		if tenant != "" {
			return ""
		}
		tenant = r.Subject
	}

	return tenant
}
